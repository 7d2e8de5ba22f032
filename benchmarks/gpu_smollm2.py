"""SmolLM2-135M in bfloat16 and the shipped drafter on a CUDA GPU: the parts of a round, passes behind contexts of new lengths with either attention, and speed -> results/smollm2_gpu.json

  python benchmarks/gpu_smollm2.py --eval FOLDER_OF_PROMPT_FILES [--n 4] [--max-tokens 128] [--out FILE]
"""
import argparse, sys, time
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import mlx_spark
import mlx.core as mx
import numpy as np

from mlx_spark import load, load_drafter
from mlx_spark.attention import attention_modules, few_attention, replaced
from mlx_spark.bench import chat_ids, json_ready, measure
from mlx_spark.cache import make_cache
from mlx_spark.core import save_result
from mlx_spark.data import read_prompts

SETS = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")

def ms_of(run):
    mx.synchronize(); tic = time.perf_counter(); run(); mx.synchronize()
    return 1e3 * (time.perf_counter() - tic)

def spread(samples): return {"median_ms": round(float(np.median(samples)), 2), "p10_ms": round(float(np.percentile(samples, 10)), 2), "p90_ms": round(float(np.percentile(samples, 90)), 2)}

def three_at_a_time(attention):
    "MLX's function, called for three queries at a time."
    def attend(queries, keys, values, cache=None, *, scale, mask=None, **others):
        n, used, parts = queries.shape[2], keys.shape[2], []
        if mask != "causal": return attention(queries, keys, values, cache=cache, scale=scale, mask=mask, **others)
        for start in range(0, n, 3):
            part = queries[:, :, start:start + 3]
            seen = used - n + start + part.shape[2]
            parts.append(attention(part, keys[:, :, :seen], values[:, :, :seen], cache=cache, scale=scale, mask="causal" if part.shape[2] > 1 else None))
        return mx.concatenate(parts, axis=2)
    return attend

WAYS = {"sdpa": None, "products": few_attention, "three": three_at_a_time}

def target_pass(model, cache, n, way):
    ids = mx.arange(100, 100 + n)[None]
    with replaced(attention_modules(model), WAYS[way]) if WAYS[way] else nullcontext(): logits = model(ids, cache=cache)
    mx.eval(logits)
    return logits

def parts_of_a_round(model, drafter, repeats=50):
    cache, found = make_cache(model), {"target_ms": [], "draft_ms": []}
    mx.eval(model(mx.arange(256)[None], cache=cache))
    for n in (1, 2, 4, 6, 8, 12, 16):
        def one():
            target_pass(model, cache, n, "products" if n > 1 else "sdpa")
            for c in cache: c.trim(n)
        for _ in range(5): one()
        found["target_ms"].append({"tokens": n, **spread([ms_of(one) for _ in range(repeats)])})
    features = mx.random.normal((1, 256, len(drafter.config.target_layer_ids) * drafter.config.target_width)).astype(drafter.dtype)
    context, anchor = drafter.make_cache(1), mx.array([11], dtype=mx.uint32)
    drafter.extend(features, context)
    for compiled in (False, True):
        drafter.compiled = compiled
        def draft():
            d = drafter.draft(anchor, context, drafter.config.block_size, want_confidence=True)
            mx.eval(d.tokens, d.confidence)
        for _ in range(5): draft()
        found["draft_ms"].append({"compiled": compiled, **spread([ms_of(draft) for _ in range(repeats)])})
    drafter.compiled = None
    return found

def fresh_lengths(model, n=8, start=300, count=48):
    "Passes over n tokens behind a context that grows by three each time, first and second time that its lengths occur."
    out, logits = {}, {}
    for way in WAYS:
        cache = make_cache(model)
        mx.eval(model(mx.arange(start - 3)[None], cache=cache))
        target_pass(model, cache, 3, way)
        for turn in ("first", "again"):
            samples = []
            for _ in range(count):
                samples.append(ms_of(lambda: target_pass(model, cache, n, way)))
                for c in cache: c.trim(n - 3)
            out[f"{way} {turn}"] = [round(x, 2) for x in samples]
            for c in cache: c.trim(3 * count)
        logits[way] = target_pass(model, cache, n, way).astype(mx.float32)
    off = {way: float(mx.abs(x - logits["sdpa"]).max()) for way, x in logits.items()}
    return {"tokens": n, "first_length": start, "step": 3, "ms": out, "largest_difference": off, "logit_spread": float(logits["sdpa"].max() - logits["sdpa"].min())}

if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--eval", required=True); p.add_argument("--n", type=int, default=4); p.add_argument("--max-tokens", type=int, default=128)
    p.add_argument("--sets", nargs="+", default=SETS); p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--out", default=str(Path(__file__).parent / "results/smollm2_gpu.json"))
    a = p.parse_args()
    model, tokenizer = load("smollm2-135m", dtype=getattr(mx, a.dtype))
    drafter = load_drafter("smollm2-135m-dspark", model)
    found, samples = fresh_lengths(model), []
    result = {"model": "smollm2-135m", "draft_model": "smollm2-135m-dspark", "dtype": a.dtype, "n": a.n, "max_tokens": a.max_tokens, "attention": found, **parts_of_a_round(model, drafter)}
    print({k: v for k, v in result.items() if k != "attention"}, {k: (round(float(np.median(v)), 1), max(v)) for k, v in found["ms"].items()}, {k: v for k, v in found.items() if k != "ms"}, flush=True)
    result["rows"] = []
    for name in a.sets:
        prompts = [chat_ids(tokenizer, turns[0]) for turns in read_prompts(Path(a.eval) / f"{name}.jsonl")[:a.n]]
        row = {"set": name, "n": a.n}
        for way, how in (("fixed 7", {"num_draft_tokens": 7}), ("planned", {"schedule": True})):
            found = measure(model, tokenizer, drafter, prompts, max_tokens=a.max_tokens, **how)
            samples.append({"set": name, "way": way, "rows": json_ready(found.pop("rows"))})
            row[way] = json_ready(found) | {"median_speedup": float(np.median([r["tok_s"] / r["plain_tok_s"] for r in samples[-1]["rows"]]))}
        result["rows"].append(row)
        print(name, {w: {k: row[w].get(k) for k in ("tau", "tok_s", "plain_tok_s", "speedup", "median_speedup", "mismatches")} for w in ("fixed 7", "planned")}, flush=True)
        save_result(a.out, result, seeds=[0], samples=samples)
