"""Tokens per second and memory of a mixture of experts under byte budgets -> benchmarks/results/offload_moe.json

python benchmarks/offload_moe.py build   WORK                     experts of random bytes, 8.3 GB, straight into an expert file
python benchmarks/offload_moe.py compare WORK --traces T [T ..]   resident arrays and mapped experts by turns, in one process
python benchmarks/offload_moe.py budget  WORK --traces T [T ..] --budget 50% --cache warm|start|always
python benchmarks/offload_moe.py plain   WORK --traces T [T ..]   what a cold start reads, by eight threads of pread and nothing else
python benchmarks/offload_moe.py report  WORK --source "whose traces, licence"

Each command is one process of a minute or two and leaves a JSON below WORK; `report` joins them, so that the parts may be taken on different occasions. QUIET=1 in the environment notes that nothing else was running.

The model: layers in the shape of Qwen3-30B-A3B at 4 bits (hidden 2048, 128 experts of 768, six a token, groups of 64), 22 of its 48, so that the experts are 8.3 GB; a vocabulary of 32000. Scales are float32 as
everything on a CPU, so an expert is 2.95 MB. Weights are random; which experts a token uses is not: the router is computed, then its choice is replaced by a recorded one (layers 0..21 of the trace, token by token,
then layers 22..43, then the next trace). Cache: `warm` = the file is in the page cache; `start` = it is dropped once, before the first token; `always` = what is evicted leaves the page cache as well, which is what
happens on a machine that has no more memory than the budget. Dropping needs root (/proc/sys/vm/drop_caches).
"""
import argparse
import json
import os
import sys
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

from mlx_spark.core import save_result, write_atomic
from mlx_spark.expert_file import open_experts, plan_experts, write_experts
from mlx_spark.expert_trace import DECODE, read_trace

RESULTS = Path(__file__).parent / "results"
N_LAYERS, TOP_K, GROUP, BITS, SEED = 22, 6, 64, 4, 0
CONFIG = dict(
    model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=N_LAYERS, intermediate_size=6144, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
    num_experts_per_tok=TOP_K, moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, rms_norm_eps=1e-6, vocab_size=32000,
    max_position_embeddings=32768, rope_theta=1e6, tie_word_embeddings=False)
GOALS = dict(warm_of_resident=.97, cold_start_50_of_resident=.6, cold_read_of_plain=.6, anonymous_over=.05, rss_over=.05)

# --- the model -------------------------------------------------------------------------------------------------

def random_experts(shapes: dict, rng) -> dict:
    "Stacked tensors of random codes: weights of mean 0 and of a size that keeps activations near 1."
    out = {}
    for name, (shape, dtype) in shapes.items():
        if name.endswith(".weight"): a = np.frombuffer(rng.bytes(4 * int(np.prod(shape))), np.uint32).reshape(shape)
        else: a = np.full(shape, (1 if name.endswith(".scales") else -7.5) / (4.6 * (shape[-1] * GROUP) ** .5), np.float32)
        out[name] = mx.array(a)
    return out

def skeleton(cls=qwen3_moe.Model):
    "The model, quantized, nothing evaluated; its experts are never to be."
    mx.random.seed(SEED)
    model = cls(qwen3_moe.ModelArgs.from_dict(CONFIG))
    nn.quantize(model, group_size=GROUP, bits=BITS, class_predicate=lambda path, m: hasattr(m, "to_quantized") and not path.endswith("mlp.gate"))
    model.eval()
    return model

def is_expert(name: str) -> bool: return ".switch_mlp." in name

def build(work: Path):
    plan, arrays = plan_experts(skeleton(), model="random qwen3_moe", model_type="qwen3_moe")
    shapes = {t.name: (t.shape, t.dtype) for t in plan.tensors.values()}
    of_layer = lambda layer: {n: s for n, s in shapes.items() if plan.tensors[n].layer == layer}
    m = write_experts(work / "experts", plan, lambda layer: random_experts(of_layer(layer), np.random.default_rng([SEED, layer])))
    print(f"{m.size / 1e9:.2f} GB", file=sys.stderr)

class Stream:
    "Recorded experts of one token after another."
    def __init__(self, paths):
        self.at, parts = 0, []
        for path in paths:
            t = read_trace(path)
            rows = t.phase == DECODE
            layers, tokens = sorted(set(t.layer[rows].tolist())), sorted(set(t.token[rows].tolist()))
            ids = np.full((len(tokens), max(layers) + 1, TOP_K), -1, np.int64)
            slot = np.zeros((len(tokens), max(layers) + 1), int)
            index = {p: i for i, p in enumerate(tokens)}
            for token, layer, e in zip(t.token[rows].tolist(), t.layer[rows].tolist(), t.expert[rows].tolist()):
                i = index[token]
                ids[i, layer, slot[i, layer]] = e
                slot[i, layer] += 1
            assert (slot[:, layers] == TOP_K).all(), f"{path}: tokens with other than {TOP_K} experts"
            ids = ids[:, layers]
            parts += [ids[:, a:a + N_LAYERS] for a in range(0, len(layers) - N_LAYERS + 1, N_LAYERS)]
        self.ids, self.parts = np.concatenate(parts), [len(p) for p in parts]   # (tokens, N_LAYERS, TOP_K)

    def now(self, layer: int) -> mx.array: return mx.array(self.ids[self.at % len(self.ids), layer].astype(np.uint32))

class RoutedBlock(qwen3_moe.Qwen3MoeSparseMoeBlock):
    "Computes its router, then uses the recorded experts; the ids still wait for the router's result, as real ones do."
    def __call__(self, x):
        gates = mx.softmax(self.gate(x), axis=-1, precise=True)
        own = mx.argpartition(gates, kth=-TOP_K, axis=-1)[..., -TOP_K:]
        ids = own * 0 + self.stream.now(self.layer)
        scores = mx.take_along_axis(gates, ids, axis=-1)
        scores /= mx.sum(scores, axis=-1, keepdims=True)
        return (self.switch_mlp(x, ids) * scores[..., None]).sum(axis=-2)

def routed(model, stream):
    for i, layer in enumerate(model.layers):
        layer.mlp.__class__ = RoutedBlock
        object.__setattr__(layer.mlp, "stream", stream)
        object.__setattr__(layer.mlp, "layer", i)
    return model

def rest_of(model) -> dict: return {n: a for n, a in tree_flatten(model.parameters()) if not is_expert(n)}

def mapped_model(work: Path, stream):
    "The model with its experts mapped from the file."
    from mlx_spark.mmap_gather import map_experts
    model = skeleton()
    mapped = map_experts(model, open_experts(work / "experts"))
    mx.eval(rest_of(model))
    mx.clear_cache()
    return routed(model, stream), mapped

def resident_model(work: Path, stream):
    "The same model with its experts in ordinary arrays."
    model = skeleton()
    with open_experts(work / "experts") as file:
        for t in file.tensors.values():
            raw = mx.array(np.fromfile(file.path, np.uint32, t.bytes // 4, offset=t.offset))
            model.load_weights([(t.name, raw.view(getattr(mx, t.dtype)).reshape(t.shape))], strict=False)
            mx.eval(dict(tree_flatten(model.parameters()))[t.name])
    mx.eval(rest_of(model))
    mx.clear_cache()
    return routed(model, stream)

# --- measuring -------------------------------------------------------------------------------------------------

def drop_caches():
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1\n")

def warm_cache(path: Path):
    with open(path, "rb", buffering=0) as f:
        while f.read(1 << 24): pass

def memory() -> dict:
    rows = [r.split() for r in Path("/proc/self/status").read_text().splitlines() if r.startswith("Rss")]
    return {r[0][:-1]: int(r[1]) << 10 for r in rows} | {"mlx_active": mx.get_active_memory()}

def available_gb() -> float:
    return next(int(l.split()[1]) for l in Path("/proc/meminfo").read_text().splitlines() if l.startswith("MemAvailable")) / 1e6

class Run:
    "One model decoding its stream, a step at a time."
    def __init__(self, model, stream):
        self.model, self.stream, self.at, self.token, self.checks = model, stream, 0, mx.array([[1]]), []
        self.cache = make_prompt_cache(model)
        self.step_s, self.peak = [], {}

    def go(self, n: int):
        for _ in range(n):
            self.stream.at = self.at
            t0 = time.perf_counter()
            logits = self.model(self.token, cache=self.cache)[:, -1]
            self.token = logits.argmax(-1, keepdims=True)
            mx.eval(self.token)
            self.step_s.append(time.perf_counter() - t0)
            self.at += 1
            for k, v in memory().items(): self.peak[k] = max(v, self.peak.get(k, 0))
            now = memory()
            self.peak["rss"] = max(now["RssAnon"] + now["RssFile"], self.peak.get("rss", 0))
            self.checks.append(self.token.item())
        return self

    def rest_bytes(self) -> int: return sum(a.nbytes for a in rest_of(self.model).values())
    def kv_bytes(self) -> int: return sum(c.nbytes for c in self.cache)

def keep(work: Path, name: str, data: dict):
    (work / "parts").mkdir(exist_ok=True)
    write_atomic(work / "parts" / f"{name}.json", json.dumps(data | {"taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "alone": bool(os.environ.get("QUIET"))}))
    print(name, {k: v for k, v in data.items() if not isinstance(v, list)}, file=sys.stderr)

def summary(run: Run, base: dict) -> dict:
    return dict(tokens=len(run.step_s), tps=len(run.step_s) / sum(run.step_s), step_s=[round(s, 5) for s in run.step_s], ids=run.checks,
                rest_bytes=run.rest_bytes(), kv_bytes=run.kv_bytes(), base=base, peak=run.peak, end=memory())

def compare(args):
    "Blocks of tokens by turns, the second model first in every other round."
    from mlx_spark.offload import attach
    if available_gb() < 18: sys.exit(f"needs 18 GB of available memory, there are {available_gb():.1f}")
    base, stream = memory(), Stream(args.traces)
    mapped, experts = mapped_model(args.work, stream)
    offload = attach(mapped, experts, budget="100%", governor=False)
    while len(offload.fits) < N_LAYERS: time.sleep(.1)     # until all is read
    runs = {"resident": Run(resident_model(args.work, stream), stream), "mapped": Run(mapped, stream)}
    for r in runs.values(): r.go(4)
    for r in runs.values(): r.step_s.clear()
    for i in range(args.tokens // args.block):
        for name in (list(runs) if i % 2 else list(runs)[::-1]): runs[name].go(args.block)
    assert runs["resident"].checks == runs["mapped"].checks, "mapped and resident chose different tokens"
    keep(args.work, "compare", {n: summary(r, base) for n, r in runs.items()} | dict(block=args.block, counters=counters(offload)))

def counters(offload) -> dict: return {phase: asdict(c) for phase, c in offload.counters.items()}

def budget(args):
    "A fresh process under one budget."
    from mlx_spark.offload import attach
    base, stream = memory(), Stream(args.traces)
    model, experts = mapped_model(args.work, stream)
    if args.cache == "warm": warm_cache(args.work / "experts" / "experts.bin")
    else: drop_caches()
    if args.cache == "always":
        drop = type(experts).drop
        type(experts).drop = lambda self, layer, expert, **options: drop(self, layer, expert, from_cache=True)
    offload = attach(model, experts, budget=args.budget, policy=args.policy, governor=False)
    run = Run(model, stream).go(args.tokens)
    data = summary(run, base) | dict(budget=args.budget, budget_bytes=offload.budget_bytes, policy=args.policy, cache=args.cache, counters=counters(offload), layers=N_LAYERS,
                                     experts_resident_bytes=experts.resident_bytes())
    keep(args.work, f"budget-{args.name or args.budget.strip('%')}-{args.cache}", data)

def plain(args):
    "The experts that a run under this budget misses, each once, from the disk with nothing else going on: router call by router call, and all at once."
    file, stream = open_experts(args.work / "experts"), Stream(args.traces)
    calls, seen = [], set()
    for t in range(args.tokens):
        for layer in range(N_LAYERS):
            new = [(layer, e) for e in stream.ids[t, layer].tolist() if (layer, e) not in seen]
            seen |= set(new)
            if new: calls.append([x for key in new for x in file.extents(*key)])
    read = lambda extent: len(os.pread(file.fd, extent[1], extent[0]))
    out = dict(bytes=sum(n for c in calls for _, n in c), calls=len(calls), threads=args.threads, tokens=args.tokens)
    with ThreadPoolExecutor(args.threads) as pool:
        for name, groups in (("all_at_once_s", [[x for c in calls for x in c]]), ("call_by_call_s", calls)):
            out[name] = []
            for _ in range(args.repeats):
                drop_caches()
                t0 = time.perf_counter()
                n = sum(sum(pool.map(read, group)) for group in groups)
                out[name].append(time.perf_counter() - t0)
                assert n == out["bytes"]
    keep(args.work, "plain", out)

# --- the report ------------------------------------------------------------------------------------------------

def median_tps(step_s, block=8): # of blocks, so that one hiccup does not decide
    blocks = [sum(step_s[i:i + block]) / block for i in range(0, len(step_s) - block + 1, block)]
    return 1 / float(np.median(blocks))

def row_of(part: dict, resident_tps: float, resident_ids: list) -> dict:
    "What a budget run comes to."
    c, need = part["counters"]["decode"], part["rest_bytes"] + part["kv_bytes"]
    anon = part["peak"]["RssAnon"] - part["base"]["RssAnon"]
    rss = part["peak"]["rss"] - part["base"]["RssAnon"] - part["base"]["RssFile"]
    n = min(len(resident_ids), len(part["ids"]))
    return dict(
        budget=part["budget"], budget_bytes=part["budget_bytes"], cache=part["cache"], policy=part["policy"], tokens=part["tokens"], tps=round(part["tps"], 4),
        of_resident=round(part["tps"] / resident_tps, 4), ids_equal=part["ids"][:n] == resident_ids[:n], ids_compared=n, hit_pct=round(100 * c["hits"] / c["lookups"], 2),
        first_touches=c["first_touches"], misses=c["misses"], read_bytes_per_token=round(c["read_bytes"] / part["tokens"]), stall_ms_per_token=round(1e3 * c["stall_s"] / part["tokens"], 2),
        sync_ms_per_token=round(1e3 * c["sync_s"] / part["tokens"], 2), read_bytes_per_s=round(c["read_bytes"] / c["stall_s"]) if c["stall_s"] else None,
        need_bytes=need, anon_bytes=anon, anon_over=round(anon / need - 1, 4), experts_resident_bytes=part["experts_resident_bytes"],
        rss_bytes=rss, rss_over=round(rss / (part["budget_bytes"] + need) - 1, 4), rss_file_peak=part["peak"]["RssFile"], mlx_active=part["end"]["mlx_active"],
        base_anon=part["base"]["RssAnon"], base_file=part["base"]["RssFile"], taken=part["taken"], alone=part["alone"])

def report(args):
    parts = {f.stem: json.loads(f.read_text()) for f in sorted((args.work / "parts").glob("*.json"))}
    c = parts["compare"]
    resident, mapped = (median_tps(c[n]["step_s"], c["block"]) for n in ("resident", "mapped"))
    rows = [row_of(p, resident, c["resident"]["ids"]) for n, p in parts.items() if n.startswith("budget-")]
    rows.sort(key=lambda r: (r["cache"], -r["budget_bytes"]))
    pick = lambda budget, cache: next((r for r in rows if r["budget"] == budget and r["cache"] == cache and r["tokens"] < 1000), None)
    plain_s = min(parts["plain"]["all_at_once_s"]) if "plain" in parts else None
    plain_rate = parts["plain"]["bytes"] / plain_s if plain_s else None
    found = dict(warm_of_resident=round(mapped / resident, 4), cold_start_50_of_resident=(r := pick("50%", "start")) and r["of_resident"],
                 cold_read_of_plain=(r := pick("50%", "start")) and plain_rate and round(r["read_bytes_per_s"] / plain_rate, 4),
                 anonymous_over=max((r["anon_over"] for r in rows), default=None), rss_over=max((r["rss_over"] for r in rows), default=None))
    met = {k: None if v is None else bool(v <= GOALS[k] if k.endswith("over") else v >= GOALS[k]) for k, v in found.items()}
    data = dict(
        source=args.source, model=dict(CONFIG, n_params_note="random weights, 4 bits in groups of 64, float32 scales"), expert_bytes=2949120, pool_bytes=2949120 * 128 * N_LAYERS,
        resident_tps=round(resident, 4), mapped_100_tps=round(mapped, 4), mean_tps=dict(resident=round(c["resident"]["tps"], 4), mapped=round(c["mapped"]["tps"], 4)), block_tokens=c["block"], resident_peak=c["resident"]["peak"], plain=parts.get("plain"),
        plain_bytes_per_s=plain_rate and round(plain_rate), goals=GOALS, found=found, met=met, rows=rows, long=long_of(args),
        note="tps of resident and mapped: median of blocks taken by turns in one process; of the rows: mean of all tokens, the cold first ones included. alone: nothing else was running. Plain rate: all bytes of the 50 % start row asked for at once. Routing recorded on real models, its own order of tokens; everything else of the model is random. Two shared virtual cores, one disk: rates vary by some 10 % from one minute to the next")
    save_result(RESULTS / "offload_moe.json", data, seeds=[SEED], samples={n: p.get("step_s") or {m: p[m]["step_s"] for m in ("resident", "mapped")} for n, p in parts.items() if n == "compare" or n.startswith("budget-")})
    print(json.dumps(dict(found=found, met=met), indent=1))

def long_of(args) -> dict | None:
    "First and last 500 tokens of the long run, if one was taken."
    file = args.long and args.long / "parts" / "budget-long-start.json"
    if not file or not file.exists(): return None
    p = json.loads(file.read_text())
    s, c = p["step_s"], p["counters"]["decode"]
    return dict(layers=p["layers"], tokens=len(s), budget=p["budget"], first_500_tps=round(500 / sum(s[:500]), 3), last_500_tps=round(500 / sum(s[-500:]), 3),
                steps_s_by_100=[round(sum(s[i:i + 100]), 3) for i in range(0, len(s) - 99, 100)], hit_pct=round(100 * c["hits"] / c["lookups"], 2),
                stall_ms_per_token=round(1e3 * c["stall_s"] / len(s), 3), anon_growth_bytes=p["end"]["RssAnon"] - p["base"]["RssAnon"] - p["rest_bytes"] - p["kv_bytes"], taken=p["taken"])

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("build", "compare", "budget", "plain", "report"))
    parser.add_argument("work", type=Path)
    parser.add_argument("--traces", nargs="+", default=[])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--cache", choices=("warm", "start", "always"), default="warm")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name")
    parser.add_argument("--layers", type=int, default=22, help="of the model; the long run takes fewer, in a WORK of its own")
    parser.add_argument("--long", type=Path, help="WORK of the long run, for `report`")
    parser.add_argument("--source", default="")
    args = parser.parse_args()
    global N_LAYERS
    N_LAYERS = CONFIG["num_hidden_layers"] = args.layers
    args.work.mkdir(parents=True, exist_ok=True)
    if args.what == "build": build(args.work)
    else: globals()[args.what](args)

if __name__ == "__main__": main()
