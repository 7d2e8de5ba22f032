"""What a hint about the domain is worth -> benchmarks/results/prefetch.json

python benchmarks/prefetch.py live   WORK --traces T [T ..]              the model of offload_moe.py (build it there first), one quiet process of some minutes
python benchmarks/prefetch.py report WORK --traces T [T ..] --source "whose traces, licence"    replays of the traces, joined with what `live` found

Held out: a profile learns from the first half of a session's decoded tokens, the second half is judged. A real trace is one session, so `right` is the same answer's earlier half (the best case of a hint) and `wrong` is
the profile moved by half the layers: as many hot experts of the same layers' sizes, but others. The synthetic traces have two tasks that differ in their popular experts and in their order of words.
In `live` the model starts with nothing in memory and the file not in the page cache: `none` no hint, `right` and `wrong` warmed while the first tokens are decoded, `waited` right and warmed before the first token (a prefill that
takes as long hides it).
"""
import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

import mlx_spark  # noqa: F401
from mlx_spark.core import save_result
from mlx_spark.expert_trace import DECODE, measure_disk, read_trace, select
from mlx_spark.prefetch import Profile, Warming, profile_of_trace, switch_cost, warm, warm_policy
from mlx_spark.residency import LRU, router_calls, run_calls, synthetic_trace

import offload_moe as bench

RESULTS = Path(__file__).parent / "results"
SHARES, FIRST = (.125, .25, .5), 32
MiB = 1 << 20

# --- replays ---------------------------------------------------------------------------------------------------

def halves(trace) -> tuple: # profile part with the prompt, held-out part
    steps = np.unique(trace.step[trace.phase == DECODE])
    cut = steps[len(steps) // 2]
    return select(trace, trace.step < cut), select(trace, trace.step >= cut)

def moved(p: Profile) -> Profile:
    "The same counts, half the layers further on."
    return Profile(p.model_id, "moved", p.n_experts, p.half_life, np.roll(p.counts, len(p.counts) // 2, 0), p.n_tokens)

def judge(name: str, held, profiles: dict, compute_s: float, disk: float) -> list:
    "Hits and misses of the first tokens of the held-out part, after each hint."
    calls, rows = router_calls(held), []
    steps = sorted(set(calls.step))[:FIRST]
    for share in SHARES:
        budget = share * calls.pool_bytes
        for hint, p in profiles.items():
            keys, policy = p.hot(budget, calls.expert_bytes) if p else [], LRU(budget, calls.expert_bytes)
            warmed = warm_policy(policy, keys)
            r = run_calls(calls, policy)
            first = lambda column: int(column[steps].sum())
            used = [(layer, e) for layer, experts in calls.pairs() for e in experts]
            rows.append(dict(
                trace=name, budget_share=share, hint=hint, warmed_bytes=warmed, lookups_on_hot_pct=round(100 * np.mean([k in set(keys) for k in used]), 2) if keys else 0.,
                first_hit_pct=round(100 * first(r.hits_by_step) / first(r.lookups_by_step), 2), all_hit_pct=round(r.hit_pct_decode, 2),
                first_missed_bytes=first(r.read_by_step), first_s_simulated=round(FIRST * compute_s + first(r.read_by_step) / disk, 3), warm_s_simulated=round(warmed / disk, 3)))
    return rows

def replays(paths, compute_s: float, disk: float) -> list:
    rows = []
    for path in paths:
        trace = read_trace(path)
        learn, held = halves(trace)
        p = profile_of_trace(learn, "right")
        rows += judge(Path(path).name.split(".")[0], held, dict(none=None, right=p, wrong=moved(p)), compute_s, disk)
    coding, prose = (synthetic_trace(n_tokens=400, n_words=30, noise=.1, expert_bytes=(MiB,), seed=s) for s in (1, 2))
    (learn, held), (other, _) = halves(coding), halves(prose)
    return rows + judge("synthetic", held, dict(none=None, right=profile_of_trace(learn, "right"), wrong=profile_of_trace(other, "wrong")), compute_s, disk)

# --- the model -------------------------------------------------------------------------------------------------

def live(args):
    from mlx_spark.offload import attach
    stream = bench.Stream(args.traces)
    model, mapped = bench.mapped_model(args.work, stream)
    layers = range(bench.N_LAYERS)
    right = Profile("random qwen3_moe", "right", {layer: 128 for layer in layers}, half_life=1e9)
    half = stream.parts[0] // 2
    for t in range(half):
        for layer in layers: right.observe(layer, stream.ids[t, layer])
    disk = [measure_disk(args.work / "experts", n_bytes=512 << 20) for _ in range(3)]
    found, ids = [], []
    for budget in args.budgets:
        for hint, p in dict(none=None, right=right, waited=right, wrong=moved(right)).items():
            mapped.drop_all(from_cache=True)
            bench.drop_caches()
            offload = attach(model, mapped, budget=budget, governor=False)
            start = time.perf_counter()
            w = warm(offload, p) if p else None
            if hint == "waited": w.wait()
            run = bench.Run(model, stream)
            run.at = half
            run.go(FIRST)
            seconds = time.perf_counter() - start
            if w: w.cancel()
            c = offload.counters["decode"]
            found.append(dict(budget=budget, hint=hint, seconds=seconds, decode_s=sum(run.step_s), step_s=run.step_s, warm_bytes=w.read_bytes if w else 0, warm_s=w.seconds if w else 0,
                              error=str(w.error) if w and w.error else None, counters=asdict(c)))
            ids.append(run.checks)
            print(budget, hint, round(seconds, 2), round(c.stall_s, 2), c.misses, w and (w.read_bytes >> 20, round(w.seconds, 2)), flush=True)
            if hint == "wrong": found[-1]["switch"] = switch(offload, right, disk)
            offload.detach()
    assert all(i == ids[0] for i in ids), "a hint changed the tokens"
    bench.keep(args.work, "prefetch-live", dict(rows=found, disk_bytes_per_s=disk, learned_tokens=half, first_tokens=FIRST))

def switch(offload, profile: Profile, disk: list) -> dict:
    "From another domain's experts to this one's, with nothing of it in the page cache."
    bench.drop_caches()
    there = offload.resident
    keys = profile.hot(offload.budget_bytes, offload.expert_bytes)
    w = Warming(offload, keys)
    w.wait()
    return switch_cost(keys, there, offload.expert_bytes, float(np.median(disk)), seconds=w.seconds) | dict(hot=len(keys), resident_before=len(there), read_bytes=w.read_bytes)

def report(args):
    file = args.work / "parts" / "prefetch-live.json"
    part = json.loads(file.read_text()) if file.exists() else None
    disk = float(np.median(part["disk_bytes_per_s"])) if part else args.disk
    compute_s = args.compute_s
    rows = replays(args.traces, compute_s, disk)
    save_result(RESULTS / "prefetch.json", dict(
        source=args.source, live=part, compute_s=compute_s, disk_bytes_per_s=disk, first_tokens=FIRST,
        note="replays are simulated: misses of an LRU; their seconds are a fixed time for each token plus missed bytes at the disk's rate. A real trace is one session: right = its own first half, wrong = the profile moved by half the layers"),
        seeds=[1, 2], samples=rows)
    for r in rows: print({k: r[k] for k in ("trace", "budget_share", "hint", "first_hit_pct", "all_hit_pct", "lookups_on_hot_pct", "first_s_simulated")})

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("live", "report"))
    parser.add_argument("work", type=Path)
    parser.add_argument("--traces", nargs="+", required=True)
    parser.add_argument("--budgets", nargs="+", default=["50%", "25%"])
    parser.add_argument("--compute-s", type=float, default=.5, help="seconds a token without misses, for the simulated times")
    parser.add_argument("--disk", type=float, default=1.7e9, help="bytes/s, where `live` has not measured it")
    parser.add_argument("--source", default="")
    args = parser.parse_args()
    globals()[args.what](args)

if __name__ == "__main__": main()
