"""Does the schedule ever lose to the best fixed length? Speed of SmolLM2-135M on a CPU, greedy, with three drafters.

The drafters: the shipped one (good), the same with noise in its weights (weak; its calibration no longer fits), and fresh
weights (random). The ways: plain decoding, every fixed length 1..7, and lengths chosen by the planner, parking included.

A shared machine changes its speed by a factor of two within a minute, so time is counted in a unit that changes with it:
after every fourth cycle one target pass over one token is timed on a cache of its own, the clock standing still meanwhile,
and what a cycle took is divided by the median of the nearest passes. Columns take turns, in another order for each prompt;
random drafts cost the same wherever the text is, so their fixed lengths are measured on 48 tokens only. Every run is a
file: the measuring can be stopped after `--seconds` and continued, the report takes what is there. All ids are compared
with plain decoding.

    python benchmarks/sweep_smollm2.py measure --raw DIR [--prompts 2] [--max-tokens 160] [--seconds 300]
    python benchmarks/sweep_smollm2.py report --raw DIR [--out benchmarks/results/sweep_smollm2.json]
"""
import argparse
import json
import random
import sys
import time
from pathlib import Path

import mlx_spark
import numpy as np

HERE = Path(__file__).parent
PROMPTS = ["Write a python function to find the shared elements of two lists.",
           "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many clips did she sell altogether?",
           "Compose a short letter to a friend about a trip to the mountains.", "Explain to a child why the sky is blue."]
DRAFTERS = ("good", "weak", "random")
WAYS = ["plain", *map(str, range(1, 8)), "scheduled"]
NOISE = 0.7 # of each matrix's own standard deviation


def make_drafter(kind: str, model):
    "The shipped drafter, whole, damaged or replaced by fresh weights."
    import mlx.core as mx
    from dataclasses import replace
    from mlx.utils import tree_map
    from mlx_spark.dspark import DSparkDrafter, load_drafter
    drafter = load_drafter("smollm2-135m-dspark", model)
    mx.random.seed(0)
    if kind == "random":
        drafter = DSparkDrafter(replace(drafter.config, calibration=None), drafter.d2t).bind(model)
        drafter.set_dtype(mx.float32)
    if kind == "weak":
        noisy = lambda w: w + NOISE * mx.std(w) * mx.random.normal(w.shape) if w.ndim == 2 else w
        drafter.update(tree_map(noisy, drafter.parameters()))
    mx.eval(drafter.parameters())
    return drafter


class Reference:
    "A target pass over one token, timed."
    def __init__(self, model):
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache
        self.model, self.cache = model, make_prompt_cache(model)
        mx.eval(model(mx.arange(10, 74)[None], cache=self.cache))

    def ms(self) -> float:
        import mlx.core as mx
        from mlx_lm.generate import generation_stream
        from mlx_lm.models.cache import trim_prompt_cache
        mx.synchronize(generation_stream)
        tic = time.perf_counter()
        with mx.stream(generation_stream): mx.eval(self.model(mx.array([[10]]), cache=self.cache))
        toc = time.perf_counter()
        trim_prompt_cache(self.cache, 1)
        return 1e3 * (toc - tic)


def one_run(model, source, prompt: list[int], way: str, n_tokens: int, reference: Reference) -> dict:
    "Ids, time of each, the cycles of one decoding, and the reference passes on the way."
    import mlx.core as mx
    from mlx_spark.generate import plan, plain_step, speculative_step
    how, planner = {}, None
    if way == "scheduled":
        planner = plan(model, source, None, context=len(prompt), n_draft=None, seed=None)
        how = dict(planner=planner)
    elif way != "plain": how = dict(num_draft_tokens=int(way))
    ids, at, cycles, last, refs, stood = [], [], [], None, [], 0.0
    steps = plain_step(mx.array(prompt), model, max_tokens=n_tokens) if way == "plain" else speculative_step(
        mx.array(prompt), model, source, max_tokens=n_tokens, **how)
    for step in steps:
        at.append(1e3 * time.perf_counter() - stood)
        ids.append(int(step.token))
        new = way == "plain" or step.cycle is not last
        if new: cycles.append((step.cycle.verify_length, step.cycle.n_accepted, int(step.cycle.parked)))
        if new and len(cycles) % 4 == 1:
            ms = reference.ms()
            refs.append((len(ids), round(ms, 1)))
            stood += ms
        last = step.cycle
    out = {"ids": ids, "ms": [round(t - at[0], 1) for t in at], "cycles": cycles[1:], "reference": refs}
    if planner is not None: out |= {"round_ms": planner.round_ms.round(2).tolist(), "plain_ms": round(planner.plain_ms, 2)}
    return out


def measure(args) -> None:
    "Runs that are not there yet, until the time is over."
    import mlx.core as mx
    from mlx_spark import load
    from mlx_spark.bench import chat_ids
    from mlx_spark.sources import as_source
    began, sources = time.perf_counter(), {}
    model, tokenizer = load("smollm2-135m", dtype=mx.float32)
    args.raw.mkdir(parents=True, exist_ok=True)
    reference, warm = Reference(model), False
    for i, text in enumerate(PROMPTS[:args.prompts]):
        columns = [(kind, way) for way in WAYS for kind in (DRAFTERS if way != "plain" else ("none",))]
        random.Random(i).shuffle(columns)
        for kind, way in columns:
            path = args.raw / f"{i}_{kind}_{way}.json"
            if path.exists(): continue
            if time.perf_counter() - began > args.seconds: return
            if kind not in sources: sources[kind] = None if kind == "none" else as_source(make_drafter(kind, model), target=model)
            prompt = chat_ids(tokenizer, text)
            if not warm: one_run(model, None, prompt, "plain", 8, reference)
            warm = True
            n_tokens = min(48, args.max_tokens) if kind == "random" and way != "scheduled" else args.max_tokens
            path.write_text(json.dumps(one_run(model, sources[kind], prompt, way, n_tokens, reference)))
            print(path.name, f"{time.perf_counter() - began:.0f} s", file=sys.stderr)


def steps_of(run: dict) -> np.ndarray: # (tokens,)
    "Time of each token behind the first, in reference passes."
    at, ref = np.array(run["reference"], dtype=float).T
    near = np.array([np.median(ref[max(i - 2, 0):i + 3]) for i in range(len(ref))])
    ms = np.array(run["ms"])
    return np.r_[0.0, np.cumsum(np.diff(ms) / np.interp(np.arange(1, len(ms)) + .5, at, near))]


def speed(run: dict, start: int = 1) -> float:
    "Tokens for the time of a reference pass, behind the first `start` tokens."
    t = steps_of(run)
    return (len(t) - start) / (t[-1] - t[start - 1])


def report(args) -> None:
    "Speeds of all columns over the prompts that are complete."
    from mlx_spark.core import save_result
    runs = {tuple(p.stem.split("_")): json.loads(p.read_text()) for p in sorted(args.raw.glob("*_*_*.json"))}
    complete = [i for i in sorted({k[0] for k in runs}) if sum(k[0] == i for k in runs) == 1 + 3 * (len(WAYS) - 1)]
    if not complete: sys.exit(f"no prompt is complete in {args.raw}: go on measuring")
    plain = {i: runs[i, "none", "plain"] for i in complete}
    rows = []
    for kind in DRAFTERS:
        of = lambda way: [plain[i] if way == "plain" else runs[i, kind, way] for i in complete]
        speeds = {way: [round(speed(r), 4) for r in of(way)] for way in WAYS}
        pooled = {way: sum(len(r["ms"]) - 1 for r in of(way)) / sum(steps_of(r)[-1] for r in of(way)) for way in WAYS}
        best = max((w for w in WAYS if w != "scheduled"), key=pooled.get)
        cycles = [c for r in of("7") for c in r["cycles"]]
        rows.append({
            "drafter": kind, "tau_at_7": round(float(np.mean([a + 1 for _, a, _ in cycles])), 3), "speeds": speeds,
            "pooled": {w: round(v, 4) for w, v in pooled.items()}, "best_fixed": best,
            "scheduled_over_best": round(pooled["scheduled"] / pooled[best], 4),
            "scheduled_over_plain_after_64": round(float(np.median([speed(runs[i, kind, "scheduled"], 64) / speed(plain[i], 64) for i in complete])), 4),
            "parked_share": round(float(np.mean([c[2] for r in of("scheduled") for c in r["cycles"]])), 3),
            "ids_match": all(r["ids"] == plain[i]["ids"][:len(r["ids"])] for w in WAYS for i, r in zip(complete, of(w)))})
        print(kind, {k: rows[-1][k] for k in ("tau_at_7", "pooled", "best_fixed", "scheduled_over_best",
                                              "scheduled_over_plain_after_64", "parked_share", "ids_match")})
    samples = [{"prompt": i, "drafter": k, "way": w, **{n: v for n, v in runs[i, k, w].items() if n != "ids"}} for i, k, w in runs if i in complete]
    n_tokens = len(plain[complete[0]]["ids"])
    save_result(args.out, {"model": "smollm2-135m", "dtype": "float32", "max_tokens": n_tokens, "prompts": len(complete), "noise": NOISE, "unit": "tokens for the time of one target pass over one token", "rows": rows},
                seeds=[0], samples=samples)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("phase", choices=("measure", "report"))
    parser.add_argument("--raw", type=Path, required=True, help="folder of runs")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--out", type=Path, default=HERE / "results/sweep_smollm2.json")
    args = parser.parse_args()
    {"measure": measure, "report": report}[args.phase](args)
