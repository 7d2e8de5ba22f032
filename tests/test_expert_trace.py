"""Recorded expert ids equal those recomputed from each family's router, in NumPy and from the weights alone."""
import argparse
import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module

import mlx_spark  # noqa: F401  (preloads BLAS before mlx)
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_spark.expert_trace import (
    DTYPES, ExpertTrace, Trace, TraceWriter, add_analyze_arguments, add_trace_arguments, check_same_model, moe_modules, read_trace, run_analyze,
    run_trace, trace_meta, write_csv)

E, K, V, D, LAYERS = 8, 2, 64, 64, 3

COMMON = dict(
    hidden_size=D, num_hidden_layers=LAYERS, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
    rms_norm_eps=1e-6, vocab_size=V, max_position_embeddings=512, rope_theta=1e4, tie_word_embeddings=False, attention_bias=False,
    num_experts=E, num_local_experts=E, n_routed_experts=E, moe_num_experts=E, num_experts_per_tok=K, moe_k=K, moe_topk=K,
    moe_intermediate_size=32, shared_expert_intermediate_size=32, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True,
    n_shared_experts=1, num_shared_expert=1, routed_scaling_factor=1.5, first_k_dense_replace=1, n_group=2, topk_group=1)

MLA = dict(kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32, num_key_value_heads=2)

FAMILIES = {
    "qwen3_moe": {},
    "qwen2_moe": {},
    "qwen3_next": dict(full_attention_interval=2, linear_num_value_heads=2, linear_num_key_heads=1, linear_key_head_dim=32,
                       linear_value_head_dim=32, linear_conv_kernel_dim=4, partial_rotary_factor=.25),
    "mixtral": {},
    "olmoe": {},
    "gpt_oss": dict(num_hidden_layers=2, sliding_window=16, layer_types=["sliding_attention", "full_attention"],
                    rope_scaling=dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=256)),
    "gemma4_text": dict(global_head_dim=32, num_kv_shared_layers=0, hidden_size_per_layer_input=0, sliding_window=16, enable_moe_block=True,
                        layer_types=["sliding_attention", "full_attention", "sliding_attention"], top_k_experts=K, tie_word_embeddings=True),
    "deepseek_v2": dict(MLA, topk_method="group_limited_greedy", rope_scaling=dict(type="yarn", factor=2.0)),
    "deepseek_v3": MLA,
    "glm4_moe": dict(use_qk_norm=True, partial_rotary_factor=.5, rope_scaling=None),
    "granitemoe": dict(logits_scaling=1.0, attention_multiplier=.2, embedding_multiplier=1.0, residual_multiplier=1.0),
    "lfm2_moe": dict(use_expert_bias=True, num_dense_layers=1, norm_eps=1e-6, conv_bias=False, conv_L_cache=3, full_attn_idxs=[1]),
    "nemotron_h": dict(hybrid_override_pattern=list("ME*E"), mamba_num_heads=2, mamba_head_dim=32, mamba_proj_bias=False, ssm_state_size=16,
                       conv_kernel=4, n_groups=1, mlp_bias=False, layer_norm_epsilon=1e-6, use_bias=False, use_conv_bias=True,
                       moe_shared_expert_intermediate_size=32),
    "phimoe": dict(rope_scaling=None),
    "dots1": {},
    "ernie4_5_moe": dict(use_bias=False, moe_num_shared_experts=1),
    "minimax": dict(shared_intermediate_size=32, rotary_dim=16),
    "hunyuan": dict(use_mixed_mlp_moe=True, use_qk_norm=True, use_cla=False, cla_share_factor=2,
                    rope_scaling=dict(type="dynamic", factor=1.0, alpha=1.0)),
    "jamba": dict(attn_layer_offset=1, attn_layer_period=2, expert_layer_offset=1, expert_layer_period=2, mamba_d_conv=4, mamba_d_state=8,
                  mamba_expand=2, mamba_dt_rank=32, num_hidden_layers=4),
    "llama4": dict(num_experts_per_tok=1, attention_chunk_size=64, interleave_moe_layer_step=1, intermediate_size_mlp=32, rope_scaling=None,
                   use_qk_norm=False, num_hidden_layers=4),
}


def build(family, *, bits=None, **changes):
    "A tiny model of the family with random weights everywhere, router corrections included."
    module = import_module(f"mlx_lm.models.{family}")
    config = COMMON | dict(model_type=family) | FAMILIES.get(family, {}) | changes
    if family == "llama4": config = dict(model_type=family, text_config=config)
    model = module.Model(module.ModelArgs.from_dict(config))
    rng = np.random.default_rng(0)
    noise = {k: mx.array(rng.standard_normal(v.shape) * (.3 if v.ndim > 1 else .1) + (v.ndim == 1 and "norm" in k), mx.float32)
             for k, v in tree_flatten(model.parameters())}
    model.update(tree_unflatten(list(noise.items())))
    model.eval()
    if bits: nn.quantize(model, group_size=32, bits=bits)
    mx.eval(model.parameters())
    return model


# --- routers by hand -------------------------------------------------------------------------------------------

def matrix(linear):
    "(E, D) float64 weights of a router's linear map, dequantized if need be."
    w = linear["weight"]
    if "scales" in linear: w = mx.dequantize(w, linear["scales"], linear["biases"], linear.group_size, linear.bits)
    return np.array(w, np.float64)

def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)

def sigmoid(x): return 1 / (1 + np.exp(-x))
def top(scores, k): return np.argsort(-scores, axis=-1)[..., :k]
def taken(scores, ids): return np.take_along_axis(scores, ids, -1)

def by_logits(x, gate, block):
    "The K largest logits; their softmax are the weights."
    logits = x @ matrix(gate).T + (np.array(gate["bias"]) if "bias" in gate else 0)
    ids = top(logits, K)
    return ids, softmax(taken(logits, ids))

def by_unnormalized(x, gate, block):
    "As `by_logits`, with softmax over all experts and no renormalization."
    p = softmax(x @ matrix(gate).T)
    return top(p, K), taken(p, top(p, K))

def by_top1(x, gate, block):
    "llama4: one expert, whose weight multiplies its input, so its output counts fully."
    ids = top(x @ matrix(gate).T, 1)
    return ids, np.ones(ids.shape)

def by_gemma(x, router, block):
    x = x / np.sqrt((x ** 2).mean(-1, keepdims=True) + 1e-6) * np.array(router["scale"]) * D ** -.5
    ids, weights = by_logits(x, router["proj"], block)
    return ids, weights * np.array(router["per_expert_scale"])[ids]

def by_groups(x, gate, block):
    "Sigmoid scores plus correction; the better of two groups (sum of its two best); weights from the uncorrected scores."
    scores = sigmoid(x @ matrix(gate).T)
    corrected = scores + np.array(gate["e_score_correction_bias"])
    halves = corrected.reshape(*corrected.shape[:-1], 2, E // 2)
    keep = np.sort(halves, -1)[..., -2:].sum(-1).argmax(-1)
    corrected = np.where(np.arange(E) // (E // 2) == keep[..., None], corrected, 0)
    ids = top(corrected, K)
    return ids, taken(scores, ids) / taken(scores, ids).sum(-1, keepdims=True) * 1.5

def by_group_max(x, gate, block):
    "deepseek_v2: the group with the largest probability, no renormalization."
    p = softmax(x @ matrix(gate).T)
    p = np.where(np.arange(E) // (E // 2) == p.reshape(*p.shape[:-1], 2, E // 2).max(-1).argmax(-1)[..., None], p, 0)
    return top(p, K), taken(p, top(p, K)) * 1.5

def by_bias(x, gate, block, name="expert_bias", scale=1.5):
    scores = sigmoid(x @ matrix(gate).T)
    ids = top(scores + np.array(block[name]), K)
    return ids, taken(scores, ids) / taken(scores, ids).sum(-1, keepdims=True) * scale

def by_minimax(x, gate, block): return by_bias(x, gate, block, "e_score_correction_bias", 1)

def by_sparsemixer(x, gate, block):
    "phimoe: the two largest logits, each weighed by a softmax over those within 2 % of it that are not chosen yet."
    logits = x @ matrix(gate).T
    ids, weights, left = top(logits, 2), [], logits.copy()
    for i in range(2):
        best = left.max(-1, keepdims=True)
        near = (best - logits) / np.maximum(np.abs(logits), best) <= 2 * .01
        weights.append(taken(softmax(np.where(near, left, -np.inf)), ids[..., i:i + 1]))
        np.put_along_axis(left, ids[..., i:i + 1], -np.inf, -1)
    return ids, np.concatenate(weights, -1)

ROUTER = dict.fromkeys(FAMILIES, by_logits) | {
    "qwen2_moe": by_unnormalized, "hunyuan": by_unnormalized, "llama4": by_top1, "gemma4_text": by_gemma, "deepseek_v2": by_group_max,
    "phimoe": by_sparsemixer, "lfm2_moe": by_bias, "minimax": by_minimax} | dict.fromkeys(
    ("deepseek_v3", "glm4_moe", "nemotron_h", "dots1"), by_groups)

def router_of(family, owner):
    "The module whose input the router sees."
    if family == "granitemoe": return owner["router"]["layer"]
    if family == "hunyuan": return owner["gate"]["wg"]
    return owner["gate"] if "gate" in owner else owner["router"]


class Watch:
    "Notes the inputs of each layer's router, by a subclass of its class; knows nothing of the code under test."
    def __init__(self, family, model):
        self.seen, parents = {}, dict(model.named_modules())
        for path, m in parents.items():
            owner = path.rpartition(".")[0]
            if type(m).__name__ not in ("SwitchGLU", "SwitchMLP"): continue
            if family == "gemma4_text": owner = owner.rpartition(".")[0]          # layers.N.experts.switch_glu; the router is beside
            layer = int(path.split("layers.")[1].split(".")[0])
            gate = router_of(family, parents[owner])
            self.seen[layer] = (gate, parents[owner], [])
            gate.__class__ = self.watching(type(gate), self.seen[layer][2])

    @staticmethod
    def watching(cls, inputs):
        class Watching(cls):
            def __call__(self, x):
                inputs.append(x)
                return super().__call__(x)
        return Watching

    def expected(self, family):
        "layer -> ids and weights (n, K), over all tokens in the order they were fed."
        out = {}
        for layer, (gate, owner, inputs) in self.seen.items():
            x = np.concatenate([np.array(i, np.float64).reshape(-1, D) for i in inputs])
            out[layer] = ROUTER[family](x, gate, owner)
        return out


def feed(model, chunks, trace=None):
    "Logits of each chunk fed in turn, with a cache."
    cache, out = make_prompt_cache(model), []
    for chunk in chunks:
        logits = model(mx.array(chunk)[None], cache=cache)
        trace.step(logits) if trace else mx.eval(logits)
        out.append(logits)
    return out

# 40 tokens are enough for the sorted path of SwitchGLU (64 ids); then decode three, then a verify pass of four
CHUNKS = np.split(np.random.default_rng(1).integers(0, V, 47), [40, 41, 42, 43])


@pytest.mark.parametrize("bits", [None, 4], ids=["fp", "4bit"])
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_ids_are_the_routers(family, bits):
    model = build(family, bits=bits)
    bare = feed(model, CHUNKS)
    classes = [type(m) for m in model.modules()]
    arrays = [id(v) for _, v in tree_flatten(model.parameters())]
    with ExpertTrace(model) as trace:
        logits = feed(model, CHUNKS, trace)
    assert [type(m) for m in model.modules()] == classes
    assert [id(v) for _, v in tree_flatten(model.parameters())] == arrays
    assert all(mx.array_equal(a, b) for a, b in zip(bare, logits))

    rows, watch = trace.take(), Watch(family, model)
    feed(model, CHUNKS)
    expected = watch.expected(family)
    assert rows.meta["moe_layers"] == sorted(expected) and rows.meta["n_layers"] == len(model.layers)
    assert rows.meta["n_experts"] == [E] * len(expected)
    for layer, (ids, _) in expected.items():
        mine = rows.layer == layer
        k = ids.shape[1]
        assert rows.meta["top_k"] == k
        assert np.array_equal(np.sort(rows.expert[mine].reshape(-1, k)), np.sort(ids)), (family, layer)
        assert np.array_equal(rows.token[mine], np.repeat(np.arange(47), k))
        assert np.array_equal(rows.phase[mine], np.repeat([0, 1], [40 * k, 7 * k]))
        assert np.array_equal(rows.step[mine], np.repeat([0, 1, 2, 3, 4], [40 * k, k, k, k, 4 * k]))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_the_routers(family):
    model = build(family)
    bare = feed(model, CHUNKS[:2])
    with ExpertTrace(model, weights=True) as trace:
        logits = feed(model, CHUNKS[:2], trace)
    assert all(mx.array_equal(a, b) for a, b in zip(bare, logits))
    rows, watch = trace.take(), Watch(family, model)
    feed(model, CHUNKS[:2])
    for layer, (ids, weights) in watch.expected(family).items():
        mine = rows.layer == layer
        got = np.zeros((41, E))
        np.put_along_axis(got, rows.expert[mine].reshape(41, -1).astype(int), rows.weight[mine].reshape(41, -1), -1)
        want = np.zeros((41, E))
        np.put_along_axis(want, ids, weights, -1)
        np.testing.assert_allclose(got, want, atol=2e-5, err_msg=f"{family} layer {layer}")


# --- what cannot be traced ---------------------------------------------------------------------------------------

def test_weights_behind_a_projection_are_refused():
    model = build("nemotron_h", moe_latent_size=32)
    with ExpertTrace(model, weights=True) as trace:
        with pytest.raises(ValueError, match="projected after they are summed"): feed(model, CHUNKS[:1], trace)
    with ExpertTrace(model) as trace: feed(model, CHUNKS[:1], trace)
    assert len(trace.take()) == 2 * 40 * K

def test_dbrx_is_refused_with_the_reason():
    from mlx_lm.models import dbrx
    args = dict(model_type="dbrx", vocab_size=V, d_model=D, n_layers=2, n_heads=2, ffn_config=dict(ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2),
                attn_config=dict(kv_n_heads=1, clip_qkv=8.0, rope_theta=1e4))
    model = dbrx.Model(dbrx.ModelArgs.from_dict(args))
    with pytest.raises(ValueError, match="dbrx cannot be traced: its experts are separate modules"): ExpertTrace(model)

LONGCAT = dict(
    model_type="longcat_flash", attention_method="MLA", zero_expert_type="identity", hidden_size=D, ffn_hidden_size=32, moe_topk=K,
    expert_ffn_hidden_size=32, n_routed_experts=E, num_layers=2, vocab_size=V, max_position_embeddings=512, num_attention_heads=2,
    kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32, routed_scaling_factor=1.0, rms_norm_eps=1e-6,
    rope_theta=1e4, mla_scale_q_lora=True, mla_scale_kv_lora=True, attention_bias=False)

def test_zero_compute_experts_are_refused():
    from mlx_lm.models import longcat_flash
    make = lambda n: longcat_flash.Model(longcat_flash.ModelArgs.from_dict(LONGCAT | dict(zero_expert_num=n)))
    with pytest.raises(ValueError, match="zero-compute experts are passed on as expert 0"): ExpertTrace(make(4))
    assert len(moe_modules(make(0))) == 2

def test_model_without_experts_is_an_error():
    from mlx_lm.models import llama
    model = llama.Model(llama.ModelArgs.from_dict(COMMON | dict(model_type="llama")))
    with pytest.raises(ValueError, match="llama has no MoE layer"): ExpertTrace(model)

def test_compiled_forward_is_refused_and_the_model_restored():
    model = build("qwen3_moe")
    classes = [type(m) for m in model.modules()]
    with pytest.raises(RuntimeError, match="inside mx.compile"):
        with ExpertTrace(model) as trace: trace.step(mx.compile(model.__call__)(mx.array(CHUNKS[0])[None]))
    assert [type(m) for m in model.modules()] == classes

def test_one_evaluation_a_step(monkeypatch):
    "Nothing is evaluated inside a layer: the only evaluation of a traced pass is the one that `step` asks for."
    model, calls = build("qwen3_moe"), []
    real = mx.eval
    with ExpertTrace(model) as trace:
        logits = model(mx.array(CHUNKS[0])[None])
        monkeypatch.setattr(mx, "eval", lambda *a: (calls.append(len(a)), real(*a)))
        trace.step(logits)
    assert calls == [1 + LAYERS]


# --- the file ----------------------------------------------------------------------------------------------------

WRITER = """
import sys, numpy as np
from mlx_spark.expert_trace import Trace, TraceWriter
meta = dict(model="m", n_layers=1, moe_layers=[0], n_experts=[128], top_k=4, expert_bytes=[10], created=None, domains=["chat"])
writer, step = TraceWriter(sys.argv[1], meta, chunk_rows=4000), 0
while True:
    n = 100
    writer.append(Trace(meta, *(np.full(4 * n, v) for v in (0, 1)), np.repeat(np.arange(n), 4), np.zeros(4 * n), np.repeat(np.arange(step, step + n), 4),
                        np.arange(4 * n) % 128))
    step += n
"""

def test_killed_writer_loses_only_the_open_chunk(tmp_path):
    path = tmp_path / "trace"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    deadline = time.monotonic() + 60
    while len(list(path.glob("[0-9]*.npz"))) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    trace = read_trace(path)
    assert len(trace) >= 12000 and len(trace) % 4000 == 0
    assert np.array_equal(trace.step, np.repeat(np.arange(len(trace) // 4), 4))
    with TraceWriter(path, trace.meta) as writer: writer.append(trace)
    again = read_trace(path)
    assert len(again) == 2 * len(trace) and np.array_equal(again.step, np.repeat(np.arange(len(trace) // 2), 4))

def test_trace_is_compact_and_survives_both_formats(tmp_path):
    model = build("qwen3_moe")
    with ExpertTrace(model, weights=True) as trace:
        for domain in ("coding", "chat"):
            trace.start(domain)
            feed(model, CHUNKS, trace)
    rows = trace.take()
    with TraceWriter(tmp_path / "t", rows.meta) as writer: writer.append(rows)
    write_csv(rows, tmp_path / "t.csv.gz")
    for back in (read_trace(tmp_path / "t"), read_trace(tmp_path / "t.csv.gz")):
        assert back.meta["domains"] == ["coding", "chat"] and back.meta["expert_bytes"] == rows.meta["expert_bytes"]
        for name in DTYPES:
            np.testing.assert_allclose(getattr(back, name), getattr(rows, name), rtol=1e-5)
    no_weights = {n: getattr(rows, n) for n in DTYPES if n != "weight"}
    with TraceWriter(tmp_path / "u", rows.meta) as writer:
        for _ in range(50): writer.append(type(rows)(rows.meta, **no_weights))
    stored = sum(p.stat().st_size for p in (tmp_path / "u").glob("*.npz"))
    assert stored < 3 * 50 * len(rows)                      # under 3 bytes a row, where the columns in memory take 15

def test_appending_weightless_rows_drops_no_row(tmp_path):
    meta = trace_meta(build("qwen3_moe")) | {"top_k": 1, "domains": ["a"]}
    one = Trace(meta, [0], [0], [0], [0], [0], [3], [.5])
    two = Trace(meta, [0], [1], [0], [0], [1], [4])
    with TraceWriter(tmp_path / "t", meta) as writer:
        writer.append(one)
        writer.append(two)
    back = read_trace(tmp_path / "t")
    assert back.expert.tolist() == [3, 4] and back.weight is None


# --- bad input ---------------------------------------------------------------------------------------------------

META = dict(model="m", n_layers=2, moe_layers=[0, 1], n_experts=[8, 8], top_k=1, expert_bytes=[10, 10], created=None, domains=["a"])

def small(n=64): return Trace(META, *(np.zeros(n), np.ones(n)), np.arange(n), np.zeros(n), np.arange(n), np.arange(n) % 8)

def command(add, run, *argv):
    parser = argparse.ArgumentParser()
    add(parser)
    return run(parser.parse_args([str(a) for a in argv]))

@pytest.mark.parametrize("head", ["# n_layer=4 n_expert=8\n", ""], ids=["stated", "unstated"])
@pytest.mark.parametrize("row, said", [
    ("0,0,0,-1", "expert is -1"), ("0,0,0,65539", "expert is 65539"), ("0,0,0,1.5", "expert is 1.5"), ("0,0,0,nan", "expert is nan"),
    ("2,0,0,1", "phase is 2"), ("-1,0,0,1", "phase is -1"), ("0,0,-1,1", "layer is -1"), ("0,0,70000,1", "layer is 70000"),
    ("0,-3,0,1", "step is -3"), ("0,0,zero,1", "column layer holds 'zero', wanted a number"), ("0,0,0,", "column expert holds ''"),
    ("0,0,0", "3 fields, the header has 4")])
def test_foreign_csv_values_are_refused_by_line(tmp_path, head, row, said):
    path = tmp_path / "foreign.csv"
    path.write_text(f"{head}phase,step,layer,expert\n0,0,0,7\n{row}\n1,1,0,1\n")
    with pytest.raises(ValueError) as e: read_trace(path)
    assert f"{path}, line {len(head.splitlines()) + 3}: {said}" in str(e.value)

@pytest.mark.parametrize("row, said", [("0,0,0,8", "expert is 8, wanted a whole number in 0..7"), ("0,0,4,0", "layer is 4, wanted a whole number in 0..3")])
def test_csv_is_held_to_the_sizes_it_states(tmp_path, row, said):
    path = tmp_path / "foreign.csv"
    path.write_text(f"# n_layer=4 n_expert=8\nphase,step,layer,expert\n{row}\n")
    with pytest.raises(ValueError, match=said): read_trace(path)
    path.write_text(f"phase,step,layer,expert\n{row}\n")
    assert len(read_trace(path)) == 1

@pytest.mark.parametrize("state, said", [
    ("# n_expert=many\n", "n_expert is 'many', wanted a whole number in 1..32768"), ("# n_expert=70000\n", "n_expert is '70000'"),
    ("# n_layer=0\n", "n_layer is '0'"), ("# layer=0 expert_bytes=big\n", "header"), ("# expert_bytes=10\n", "header")])
def test_csv_header_must_state_usable_sizes(tmp_path, state, said):
    path = tmp_path / "foreign.csv"
    path.write_text(f"{state}phase,step,layer,expert\n0,0,0,65539\n")
    with pytest.raises(ValueError, match=f"foreign.csv.*{said}"): read_trace(path)

def test_damaged_files_are_named(tmp_path):
    folder = tmp_path / "t"
    with TraceWriter(folder, META) as writer: writer.append(small())
    packed = tmp_path / "t.csv.gz"
    write_csv(small(), packed)
    whole = packed.read_bytes()
    for damaged in (whole[:-20], whole[:40], b"no gzip at all", whole[:20] + b"\xff" * 20 + whole[40:]):
        packed.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"t\.csv\.gz is cut short or damaged"): read_trace(packed)
    chunk = folder / "000000.npz"
    whole = chunk.read_bytes()
    for damaged in (b"", whole[:3], whole[:60], whole[:len(whole) // 2], whole[:-1], whole[:90] + b"\xff" * 30 + whole[120:]):
        chunk.write_bytes(damaged)
        for use in (lambda: read_trace(folder), lambda: TraceWriter(folder, META)):
            with pytest.raises(ValueError, match=r"000000\.npz is cut short or damaged"): use()
    (folder / "meta.json").write_text('{"model": ')
    with pytest.raises(ValueError, match=r"meta\.json is cut short or damaged"): read_trace(folder)

@pytest.mark.parametrize("rate", ["0", "-5", "nan", "inf"])
def test_disk_rate_must_be_positive(tmp_path, rate):
    with TraceWriter(tmp_path / "t", META) as writer: writer.append(small())
    with pytest.raises(ValueError, match="--disk-mb-s must be above 0"):
        command(add_analyze_arguments, run_analyze, tmp_path / "t", f"--disk-mb-s={rate}")

def test_empty_traces_are_refused(tmp_path):
    (tmp_path / "head.csv").write_text("phase,step,layer,expert\n")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "meta.json").write_text(json.dumps(META | {"format": 1}))
    for name in ("head.csv", "t"):
        with pytest.raises(ValueError, match=f"{name} holds no routing"):
            command(add_analyze_arguments, run_analyze, tmp_path / name, "--disk-mb-s", 100)

def test_folder_of_another_model_is_refused_before_generating(tmp_path, monkeypatch):
    from mlx_spark import expert_trace
    out = tmp_path / "t"
    with TraceWriter(out, META) as writer: writer.append(small())
    asked, real = [], expert_trace.record_generation
    monkeypatch.setattr(expert_trace, "record_generation", lambda *a, **k: asked.append(1) or real(*a, **k))
    record = lambda to: command(add_trace_arguments, run_trace, "--model", "tiny:qwen3_moe", "--domain", "chat", "--out", to, "--max-tokens", 1)
    with pytest.raises(ValueError, match="holds another trace: model m there, tiny:qwen3_moe here"): record(out)
    assert not asked
    assert record(tmp_path / "new") == record(tmp_path / "new") == 0 and len(asked) == 16          # the same model is continued

def test_profiles_of_other_models_are_refused():
    check_same_model(META, META | dict(model="the same by another name", top_k=2, expert_bytes=[20, 20]))
    with pytest.raises(ValueError, match=r"different models \(m, other\): n_experts \[8, 8\] and \[8, 16\]"):
        check_same_model(META, META | dict(model="other", n_experts=[8, 16]))
    with pytest.raises(ValueError, match=r"moe_layers \[0, 1\] and \[1, 2\]"): check_same_model(META, META | dict(moe_layers=[1, 2]))
