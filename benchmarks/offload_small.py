"""Time of a token and memory under byte budgets, on a small mixture of experts -> benchmarks/results/offload_small.json

python benchmarks/offload_small.py WORK [--tokens 60]

8 layers of 64 experts, 6 a token, 4 bits: 0.5 GB of random weights in WORK (made if absent), with seeded routing in place of the router's own (Zipf popularity, a Markov chain of words), so that it has habits. Every budget twice:
`warm`, where what is evicted stays in the page cache, and `cold`, where it leaves it, as on a machine that has no memory to spare. Then what the cold reads reach beside a plain parallel read of the same bytes.
"""
import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np

import mlx_spark  # noqa: F401
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_moe
from mlx_lm.models.cache import make_prompt_cache

from mlx_spark.core import save_result
from mlx_spark.expert_file import open_experts, plan_experts, write_experts
from mlx_spark.mmap_gather import map_experts, memory_now
from mlx_spark.offload import attach
from mlx_spark.residency import synthetic_trace

L, E, K, SEED, SKIP = 8, 64, 6, 0, 20
BUDGETS = ("100%", "75%", "50%", "25%", "12.5%", "0%")
CONFIG = dict(
    model_type="qwen3_moe", hidden_size=1024, num_hidden_layers=L, intermediate_size=512, num_attention_heads=16, num_key_value_heads=4, head_dim=64, num_experts=E, num_experts_per_tok=K,
    moe_intermediate_size=512, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, rms_norm_eps=1e-6, vocab_size=8192, max_position_embeddings=4096, rope_theta=1e6, tie_word_embeddings=False)

class Routed(qwen3_moe.Qwen3MoeSparseMoeBlock):
    "Computes its router, then uses seeded ids; they wait for the router's result, as real ones do."
    stream, at = None, 0
    def __call__(self, x):
        gates = mx.softmax(self.gate(x), axis=-1, precise=True)
        ids = mx.argpartition(gates, kth=-K, axis=-1)[..., -K:] * 0 + mx.array(self.stream[Routed.at, self.layer])
        scores = mx.take_along_axis(gates, ids, axis=-1)
        return (self.switch_mlp(x, ids) * (scores / scores.sum(axis=-1, keepdims=True))[..., None]).sum(axis=-2)

def model():
    mx.random.seed(SEED)
    m = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(CONFIG))
    nn.quantize(m, group_size=64, bits=4, class_predicate=lambda path, x: hasattr(x, "to_quantized") and not path.endswith("gate"))
    for i, layer in enumerate(m.layers):
        layer.mlp.__class__ = Routed
        object.__setattr__(layer.mlp, "layer", i)
    return m.eval()

def pack(folder: Path):
    plan, arrays = plan_experts(model())
    scale = lambda t: np.full(t.shape, (1 if t.name.endswith("scales") else -7.5) / (4.6 * (t.shape[-1] * 64) ** .5), np.float32)
    rng = np.random.default_rng(SEED)
    random = lambda t: rng.integers(0, 1 << 32, t.shape, dtype=np.uint32) if t.dtype == "uint32" else scale(t)
    write_experts(folder, plan, lambda layer: {t.name: mx.array(random(t)) for t in plan.tensors.values() if t.layer == layer}, progress=False)

def decode(m, n: int, *, watch=lambda: None) -> tuple: # ms of each token after the first SKIP, ids, most file pages mapped
    cache, token, ms, ids, most = make_prompt_cache(m), mx.array([[1]]), [], [], 0
    for Routed.at in range(n + SKIP):
        if Routed.at == SKIP: watch()
        start = time.perf_counter()
        token = m(token, cache=cache)[:, -1].argmax(-1, keepdims=True)
        mx.eval(token)
        ms.append(1000 * (time.perf_counter() - start))
        ids.append(token.item())
        most = max(most, memory_now()["rss_file"])
    return ms[SKIP:], ids, most

def plain_rate(file, keys, threads: int = 8) -> float: # bytes a second
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    extents = [x for key in keys for x in file.extents(*key)]
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool: total = sum(pool.map(lambda x: len(os.pread(file.fd, x[1], x[0])), extents))
    return total / (time.perf_counter() - start)

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--tokens", type=int, default=60)
    args = parser.parse_args()
    if not (args.work / "experts.json").exists(): pack(args.work)
    trace = synthetic_trace(n_tokens=args.tokens + SKIP, n_prompt=1, n_layers=L, n_experts=E, top_k=K, seed=SEED)
    Routed.stream = trace.expert.reshape(-1, L, K)[1:].astype(np.uint32)
    file, mapped = open_experts(args.work), model()
    experts = map_experts(mapped, file)
    mx.eval(mapped.parameters())
    resident = model()
    resident.load_weights([(n, mx.array(np.array(a))) for n, a in tree_flatten(mapped.parameters()) if "switch_mlp" in n], strict=False)
    mx.eval(resident.parameters())
    decode(resident, 5)
    rows, samples, base = [], {}, None
    for name, m, options in [("resident", resident, None), ("mapped", mapped, None)] + [
            (f"{b} {kind}", mapped, dict(budget=b, from_cache=kind == "cold")) for b in BUDGETS for kind in ("warm", "cold")] + [("resident again", resident, None)]:
        experts.drop_all(from_cache=True)
        if "cold" not in name:
            with open(file.path, "rb") as f:
                while f.read(1 << 24): pass
        before = memory_now()["rss_file"]
        offload = attach(mapped, experts, governor=False, **options) if options else None
        if offload and offload.budget_bytes == offload.pool_bytes and "warm" in name: offload.loader.join()
        ms, ids, most = decode(m, args.tokens, watch=offload.reset_counters if offload else lambda: None)
        base = base or ids
        row = dict(name=name, ms=float(np.median(ms)), rss_file_grown=most - before, same_ids=ids == base)
        if offload:
            c = offload.counters["decode"]
            row |= dict(budget_bytes=offload.budget_bytes, policy=offload.policy_name, hit_pct=c.hit_pct, read_bytes_per_token=c.read_bytes / c.tokens, stall_ms_per_token=c.stall_ms_per_token, counters=asdict(c))
            offload.detach()
        rows.append(row)
        samples[name] = [round(t, 3) for t in ms]
        print({k: v for k, v in row.items() if k != "counters"}, flush=True)
    rates = []
    for i in range(5):
        rng = np.random.default_rng(i)
        calls = [[(l, int(e)) for e in rng.choice(E, K, replace=False)] for l in range(L)]
        flat = [key for call in calls for key in call]
        plain = plain_rate(file, flat)
        experts.drop_all(from_cache=True)
        start = time.perf_counter()
        total = sum(experts.read(call) for call in calls)
        rates.append(dict(plain_all_at_once_mb_s=plain / 1e6, ours_by_router_call_mb_s=total / (time.perf_counter() - start) / 1e6))
    print(rates)
    save_result(Path(__file__).parent / "results" / "offload_small.json", dict(
        what="random Qwen3-MoE, 8 layers x 64 experts, top 6, 4 bits; synthetic routing; CPU", pool_bytes=sum(t.bytes for t in file.tensors.values()), expert_bytes=file.expert_bytes[0],
        tokens=args.tokens, skipped=SKIP, rows=rows, rates=rates), seeds=[SEED], samples=samples)

if __name__ == "__main__": main()
