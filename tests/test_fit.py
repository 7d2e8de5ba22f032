"""Predicted bytes are the real ones: weights of every family and quantization, caches after any prefill, and the command's answers."""
import argparse
import json
import subprocess
import sys

import mlx_spark  # noqa: F401  (preloads BLAS before mlx)
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import quantize_model
from test_expert_file import config_of, save
from test_expert_trace import E, FAMILIES, K, build

from mlx_spark.expert_file import pack_experts
from mlx_spark.expert_trace import TraceWriter, expert_bytes, moe_modules
from mlx_spark.fit import add_arguments, anatomy, fit, kv_bytes, lazy_model, open_model, run
from mlx_spark.residency import synthetic_trace
from mlx_spark.targets import save_tiny, tiny_target

RATES = dict(weight_rate=1e9, disk_rate=1e8)
QUANTIZE = {"fp": None, "affine3": dict(bits=3, group_size=32), "affine8": dict(bits=8, group_size=32), "mxfp4": dict(mode="mxfp4"), "nvfp4": dict(mode="nvfp4")}

def real_bytes(model): return sum(v.nbytes for _, v in tree_flatten(model.parameters()))

def typed(config, dtype="float32"):
    if "text_config" in config: return config | {"text_config": config["text_config"] | {"dtype": dtype}}
    return config | {"dtype": dtype}

@pytest.mark.parametrize("how", QUANTIZE)
@pytest.mark.parametrize("family", [*FAMILIES, "llama", "qwen3"])
def test_weights(family, how):
    wide = dict(intermediate_size=64, moe_intermediate_size=64, shared_expert_intermediate_size=64)      # some routers and outputs want groups of 64
    config, real = typed(config_of(family, **wide)), build(family, **wide)
    if QUANTIZE[how]: real, written = quantize_model(real, config, **{"bits": None, "group_size": None} | QUANTIZE[how])
    else: written = config
    pool = sum(E * expert_bytes(m) for m in moe_modules(real).values()) if family in FAMILIES else 0
    for a in (anatomy(lazy_model(config, quantize=QUANTIZE[how])), anatomy(lazy_model(written))):
        assert (a["weight_bytes"], a["expert_bytes"], a["other_bytes"]) == (real_bytes(real), pool, real_bytes(real) - pool)
        assert {l["top_k"] for l in a["moe_layers"]} <= {1 if family == "llama4" else K}
        assert a["cycle_bytes"] == sum(l["top_k"] * l["expert_bytes"] for l in a["moe_layers"])

@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "deepseek_v3", "nemotron_h"])
def test_types_that_a_family_keeps(family, dtype):
    "Parameters that mlx-lm leaves in float32 (A_log, corrections of routers) are counted so."
    config, real = config_of(family), build(family)
    keep = getattr(real, "cast_predicate", lambda name: True)
    real.load_weights([(k, v.astype(getattr(mx, dtype))) for k, v in tree_flatten(real.parameters()) if keep(k)], strict=False)
    assert anatomy(lazy_model(typed(config, dtype)))["weight_bytes"] == real_bytes(real)

@pytest.mark.parametrize("family", [*FAMILIES, "llama"])
def test_caches(family):
    config, real = typed(config_of(family)), build(family)
    lazy = lazy_model(config)
    caches = anatomy(lazy)["caches"]
    for n, chunk, n_decoded in ((1, 8, 0), (70, 32, 0), (70, 32, 2), (260, 512, 1), (300, 100, 0)):
        cache, at = make_prompt_cache(real), 0
        for s in [min(chunk, n - n_decoded - i) for i in range(0, n - n_decoded, chunk)] + [1] * n_decoded:
            mx.eval(real(mx.arange(at, at + s)[None] % 64, cache=cache))
            at += s
        assert kv_bytes(lazy, caches, n, chunk=chunk, n_decoded=n_decoded)[0] == sum(c.nbytes for c in cache), (n, chunk, n_decoded)

def test_the_largest_size_on_the_way_counts():
    lazy = lazy_model(typed(config_of("gemma4_text")))
    caches = anatomy(lazy)["caches"]
    last, most = kv_bytes(lazy, caches, 130, chunk=64, n_decoded=1)
    assert most > last
    with_chunk = [kv_bytes(lazy, caches, 512, chunk=c)[1] for c in (16, 64, 256)]
    assert with_chunk == sorted(with_chunk) and with_chunk[0] < with_chunk[2]      # windows hold a whole chunk for a moment

def test_agrees_with_the_packed_file(tmp_path):
    model = build("qwen3_moe", bits=4)
    folder = save(tmp_path / "model", model, config_of("qwen3_moe") | {"quantization": {"group_size": 32, "bits": 4}})
    m = pack_experts(folder, tmp_path / "out", progress=False)
    r = fit(folder, 1e9, **RATES)
    assert r["expert_bytes"] == sum(t.bytes for t in m.tensors.values()) and r["source"] == "weights" and r["weight_bytes"] == real_bytes(model)

def test_weights_that_were_inferred_count(tmp_path):
    "mlx-lm infers the quantization of modules that the configuration does not name; a folder with weights is taken at its tensors."
    import mlx.nn as nn
    model = build("qwen3_moe")
    nn.quantize(model, group_size=32, bits=8, class_predicate=lambda p, m: "switch_mlp" in p and hasattr(m, "to_quantized"))
    folder = save(tmp_path / "model", model, config_of("qwen3_moe") | {"quantization": {"group_size": 64, "bits": 4}})
    assert fit(folder, 1e9, **RATES)["weight_bytes"] == real_bytes(model)

@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_modules_that_no_entry_names_follow_their_class(family, tmp_path):
    "Routers that a class wants in 8 bits and groups of 64, in a configuration that says only 4 bits and 32."
    folder = save_tiny(tmp_path / "model", family, bits=4)
    real = tiny_target(family, bits=4)[0]
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "float32"}
    assert anatomy(lazy_model(config))["weight_bytes"] == real_bytes(real) == fit(folder, 1e9, **RATES)["weight_bytes"]

def verdicts(config, sizes, **options): return [fit(config, s, **dict(usable=1, context=256, chunk=64) | RATES | options)["verdict"].split(" at ")[0].split(":")[0] for s in sizes]

@pytest.mark.parametrize("family", ["qwen3_moe", "gemma4_text", "gpt_oss", "nemotron_h"])
def test_the_verdict_flips_at_the_byte(family):
    config = typed(config_of(family))
    r = fit(config, 1e9, usable=1, context=256, chunk=64, **RATES)
    need = r["resident"]["needs_bytes"]
    assert need == r["weight_bytes"] + r["kv_bytes"] + r["work_bytes"]
    least = need - r["expert_bytes"] + r["cycle_bytes"]
    assert verdicts(config, [need, need - 1, least, least - 1]) == ["fits", "fits with offload", "fits with offload", "does not fit"]
    assert fit(config, need, usable=1, context=256, chunk=64, **RATES)["resident"]["max_context"] >= 256

def test_dense_models_have_no_offload():
    config = typed(config_of("llama"))
    r = fit(config, 1e9, **RATES)
    assert r["offload"] is None and r["expert_bytes"] == r["cycle_bytes"] == 0
    assert verdicts(config, [1e9, 1000]) == ["fits", "does not fit"]

LOOK = """
import json, resource, sys
import mlx_spark, mlx.core as mx
from mlx_spark.fit import fit
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
before = peak()
r = fit(json.loads(sys.argv[1]), 24e9, quantize=dict(bits=4), context=100_000, weight_rate=1e11, disk_rate=3e9)
print(json.dumps([peak() - before, mx.get_peak_memory(), r["weight_bytes"], r["kv_bytes"]]))
"""

def test_looking_at_a_large_model_costs_nothing():
    config = dict(model_type="qwen3_moe", dtype="bfloat16", hidden_size=4096, num_hidden_layers=94, intermediate_size=12288, num_attention_heads=64,
                  num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536, decoder_sparse_step=1, mlp_only_layers=[],
                  norm_topk_prob=True, rms_norm_eps=1e-6, vocab_size=151936, max_position_embeddings=262144, rope_theta=1e6, tie_word_embeddings=False)
    done = subprocess.run([sys.executable, "-c", LOOK, json.dumps(config)], capture_output=True, text=True, check=True)
    grown, mlx_peak, weights, kv = json.loads(done.stdout)
    assert 130e9 < weights < 135e9                                    # Qwen3-235B-A22B in 4.5 bits
    assert kv == 94 * 4 * 128 * 2 * 2 * 100_096                       # 256 at a time
    assert grown < 300e6 and mlx_peak < 1e6

def command(*argv):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(a) for a in argv]))

GIVEN = ("--disk-mb-s", 1000, "--memory-gb-s", 10)

def tight(folder) -> str:
    "Memory in which half of the experts fit."
    r = fit(folder, 1e9, usable=1, context=64, **RATES)
    return f"{r['resident']['needs_bytes'] - r['expert_bytes'] // 2}B"

def test_command(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(typed(config_of("qwen3_moe"))))
    for where in (tmp_path, tmp_path / "config.json"):
        assert command(where, "--memory", "1GB", *GIVEN, "--json") == 0
        out = capsys.readouterr()
        r = json.loads(out.out.splitlines()[-1])
        assert r["verdict"] == "fits" and r["rates_from"] == {"disk": "given", "weights": "given"} and "qwen3_moe (from its configuration): fits" in out.err
    four = [command(tmp_path, "--memory", "1GB", *GIVEN, "--json", *more) or json.loads(capsys.readouterr().out)["weight_bytes"] for more in ([], ["--bits", 4, "--group-size", 32])]
    assert four[1] < four[0] / 4
    assert command(tmp_path, "--memory", tight(tmp_path), "--context", 64, "--usable", 1, *GIVEN) == 0
    assert "fits with offload at budget" in capsys.readouterr().out

def test_command_with_a_trace(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(typed(config_of("qwen3_moe"))))
    trace = synthetic_trace()
    with TraceWriter(tmp_path / "trace", trace.meta) as writer: writer.append(trace)
    hits = {}
    for policy in ("lru", "belady"):
        command(tmp_path, "--memory", tight(tmp_path), "--context", 64, "--usable", 1, *GIVEN, "--trace", tmp_path / "trace", "--policy", policy, "--json")
        r = json.loads(capsys.readouterr().out)
        assert r["hits_from"] == "a trace"
        hits[policy] = r["offload"]["hit_rate"][1]
    assert hits["lru"] < hits["belady"] < 1

def test_command_measures_what_is_not_given(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(typed(config_of("qwen3_moe"))))
    command(tmp_path, "--memory", "1GB", "--disk-path", tmp_path, "--json")
    r = json.loads(capsys.readouterr().out)
    assert r["rates_from"] == {"disk": "measured", "weights": "measured"} and min(r["rates"].values()) > 1e6

@pytest.mark.parametrize("argv, said", [
    (["--memory", "50%"], "--memory is a size such as 24GB, got '50%'"), (["--memory=-3GB"], "a budget is positive"), (["--memory", "much"], "a number with a unit"),
    (["--memory", "1GB", "--disk-mb-s", "-1"], "--disk-mb-s must be above 0"), (["--memory", "1GB", "--memory-gb-s", "nan"], "--memory-gb-s must be above 0"),
    (["--memory", "1GB", "--context", "0"], "at least one token"), (["--memory", "1GB", "--usable", "1.5"], "in \\(0, 1\\]")])
def test_bad_arguments(tmp_path, argv, said):
    (tmp_path / "config.json").write_text(json.dumps(typed(config_of("qwen3_moe"))))
    given = [] if "--disk-mb-s" in argv or "--memory-gb-s" in argv else GIVEN
    with pytest.raises(ValueError, match=said): command(tmp_path, *argv, *given)

def test_bad_models(tmp_path):
    with pytest.raises(FileNotFoundError, match="neither a folder of a model nor a config.json"): open_model(tmp_path / "no")
    with pytest.raises(FileNotFoundError, match="it has no config.json"): open_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type"')
    with pytest.raises(ValueError, match="is no configuration"): open_model(tmp_path / "config.json")
    (tmp_path / "config.json").write_text('{"model_type": "perpetuum"}')
    with pytest.raises(ValueError, match="perpetuum not supported"): open_model(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    with pytest.raises(ValueError, match="model_type is missing, found"): open_model(tmp_path)
