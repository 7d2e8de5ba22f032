"""Write tiny.gguf and tiny.safetensors: a random Llama in GGUF form, and the weights that a reader must find in it.

Source: the `gguf` package 0.19.0 of the llama.cpp project (GGUFWriter, quants.quantize, quants.dequantize) with numpy 2.4.6;
nothing of mlx_spark is imported. Run: pip install gguf==0.19.0 safetensors && python make_gguf.py
The expected weights are in Hugging Face row order: quantizing works along rows, so they are dequantize(quantize(w)) of the
weights before llama.cpp's reordering of the rows of q and k.
"""
import numpy as np
from gguf import GGMLQuantizationType as Kind, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from safetensors.numpy import save_file

D, F, HEADS, KV, LAYERS, V, THETA = 64, 96, 4, 2, 2, 288, 10000.0
rng = np.random.default_rng(7)


def reorder(w, n_heads):  # llama.cpp's order of a rotary projection: pairs (i, i + half) become neighbours
    return w.reshape(n_heads, 2, w.shape[0] // n_heads // 2, -1).swapaxes(1, 2).reshape(w.shape)


def letters():
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in kept]
    return [chr(256 + rest.index(b)) if b in rest else chr(b) for b in range(256)]


out = GGUFWriter("tiny.gguf", "llama")
out.add_name("tiny random llama")
out.add_block_count(LAYERS)
out.add_context_length(512)
out.add_embedding_length(D)
out.add_feed_forward_length(F)
out.add_head_count(HEADS)
out.add_head_count_kv(KV)
out.add_rope_freq_base(THETA)
out.add_rope_dimension_count(D // HEADS)
out.add_layer_norm_rms_eps(1e-5)
out.add_vocab_size(V)
out.add_tokenizer_model("gpt2")
out.add_tokenizer_pre("smollm")
special = ["<|end|>"] + [f"<|{i}|>" for i in range(258, V)]
out.add_token_list(letters() + ["he"] + special)
out.add_token_types([TokenType.NORMAL] * 257 + [TokenType.CONTROL] * len(special))
out.add_token_merges(["h e"])
out.add_eos_token_id(257)
out.add_add_bos_token(False)
out.add_chat_template("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")

expected = {}


def add(theirs, ours, shape, kind, n_heads=None, center=0.0):
    w = (center + rng.standard_normal(shape) * (0.1 if center else shape[-1] ** -0.5)).astype(np.float32)
    stored = reorder(w, n_heads) if n_heads else w
    out.add_tensor(theirs, quantize(stored, kind), raw_dtype=kind)
    expected[ours] = dequantize(quantize(w, kind), kind).astype(np.float32)


add("token_embd.weight", "model.embed_tokens.weight", (V, D), Kind.Q8_0)
for i, (attn, ffn) in enumerate([(Kind.Q4_1, Kind.Q4_1), (Kind.Q8_0, Kind.Q4_0)]):
    t, o = f"blk.{i}.", f"model.layers.{i}."
    add(t + "attn_norm.weight", o + "input_layernorm.weight", (D,), Kind.F32, center=1.0)
    add(t + "attn_q.weight", o + "self_attn.q_proj.weight", (D, D), attn, HEADS)
    add(t + "attn_k.weight", o + "self_attn.k_proj.weight", (KV * D // HEADS, D), attn, KV)
    add(t + "attn_v.weight", o + "self_attn.v_proj.weight", (KV * D // HEADS, D), attn)
    add(t + "attn_output.weight", o + "self_attn.o_proj.weight", (D, D), Kind.F16)
    add(t + "ffn_norm.weight", o + "post_attention_layernorm.weight", (D,), Kind.F32, center=1.0)
    add(t + "ffn_gate.weight", o + "mlp.gate_proj.weight", (F, D), ffn)
    add(t + "ffn_up.weight", o + "mlp.up_proj.weight", (F, D), ffn)
    add(t + "ffn_down.weight", o + "mlp.down_proj.weight", (D, F), ffn)
add("output_norm.weight", "model.norm.weight", (D,), Kind.F32, center=1.0)
add("output.weight", "lm_head.weight", (V, D), Kind.F16)

out.write_header_to_file()
out.write_kv_data_to_file()
out.write_tensors_to_file()
out.close()
save_file(expected, "tiny.safetensors")
