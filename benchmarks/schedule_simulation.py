"""Simulation: R requests share target passes; how many drafts to verify under none, a fixed number, a threshold, Algorithm 1.

Nothing is decoded. Drafts are kept with the probability that their confidence says, so confidences are calibrated by
construction; passes take the time of a measured curve (continued with its last slope beyond 16 tokens) or of a jagged one
made up for this purpose. Writes benchmarks/results/schedule_simulation.json.

    python benchmarks/schedule_simulation.py [--rounds 200] [--out FILE]
"""
import argparse
import json
from pathlib import Path

import mlx_spark
import numpy as np

from mlx_spark.core import save_result
from mlx_spark.scheduler import Costs, algorithm1, capacity, threshold_lengths, top_k_lengths

HERE = Path(__file__).parent
GAMMA, REQUESTS = 7, [1, 2, 4, 8, 16, 32, 64, 128, 256]
DRAFT_SHARE = 0.2 # a drafter pass over R requests, of a target pass over R tokens


def measured() -> dict[str, Costs]:
    "Medians of the results files of one target pass, made monotone."
    cpu = json.loads((HERE / "results/verify_time.json").read_text())
    gpu = json.loads((HERE / "results/smollm2_gpu_round.json").read_text())
    curves = {f"CPU, {s['blas']}": (cpu["tokens"], np.median(s["ms"], axis=1)) for s in cpu["samples"]}
    curves["NVIDIA H200"] = ([r["tokens"] for r in gpu["target_ms"]], [r["median_ms"] for r in gpu["target_ms"]])
    return {name: Costs(list(n), np.maximum.accumulate(ms).tolist()) for name, (n, ms) in curves.items()}


def jagged() -> Costs:
    "Made up: 6 ms, a little a token, and 3 ms more for every started tile of 64 tokens."
    tokens = np.arange(1, 2 + REQUESTS[-1] * (GAMMA + 1))
    return Costs(tokens.tolist(), (6 + 0.004 * tokens + 3.0 * ((tokens - 1) // 64)).tolist())


def moods(R: int, rng: np.random.Generator) -> np.ndarray: # (R, 1) mean confidence logits
    "Half of the requests are easy to draft for, half are not."
    return np.where(np.arange(R)[:, None] % 2 == 0, 2.0, 0.0) + 0.5 * rng.normal(size=(R, 1))


def lengths(policy: str, conf: np.ndarray, old: np.ndarray, sps: np.ndarray) -> list[int]:
    "Drafts to verify, (R,)."
    if policy == "none": return [0] * len(conf)
    if policy.startswith("fixed"): return [int(policy.split()[1])] * len(conf)
    if policy.startswith("threshold"): return threshold_lengths(conf, float(policy.split()[1]))
    if policy == "algorithm 1": return algorithm1(conf, sps).lengths
    return top_k_lengths(conf, capacity(old, sps))


POLICIES = ("none", "fixed 7", "fixed 3", "threshold 0.5", "algorithm 1", "delayed capacity")


def simulate(policy: str, R: int, costs: Costs, n_rounds: int, seed: int = 0) -> dict:
    "Tokens a second, of all requests and of one."
    rng = np.random.default_rng([seed, R])
    mean, draft_ms, tokens, time_ms, verified, history = moods(R, rng), DRAFT_SHARE * float(costs.pass_ms(R)), 0, 0.0, 0, []
    round_ms = draft_ms + costs.pass_ms(np.arange(1, R * (GAMMA + 1) + 1))
    sps = np.r_[0.0, 1e3 / round_ms]
    for _ in range(n_rounds + 2):
        conf = 1 / (1 + np.exp(-(mean + rng.normal(size=(R, 1)) + 0.7 * rng.normal(size=(R, GAMMA)))))
        kept = np.cumprod(rng.random(conf.shape) < conf, axis=1)
        history.append(conf)
        if len(history) < 3: continue
        l = lengths(policy, conf, history[-3], sps)
        tokens += R + sum(int(kept[r, :n].sum()) for r, n in enumerate(l))
        verified += sum(l)
        time_ms += float(costs.pass_ms(R + sum(l))) + draft_ms * (policy != "none")
    return {"policy": policy, "R": R, "tok_s": 1e3 * tokens / time_ms, "tok_s_request": 1e3 * tokens / time_ms / R,
            "tau": tokens / (R * n_rounds), "verified": verified / (R * n_rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path, default=HERE / "results/schedule_simulation.json")
    args = parser.parse_args()
    rows = []
    for name, costs in {**measured(), "jagged (made up)": jagged()}.items():
        for policy in POLICIES: rows += [{"curve": name} | simulate(policy, R, costs, args.rounds) for R in REQUESTS]
    save_result(args.out, {"what": __doc__.splitlines()[0], "gamma": GAMMA, "draft_share": DRAFT_SHARE, "rounds": args.rounds}, seeds=[0], samples=rows)


if __name__ == "__main__": main()
