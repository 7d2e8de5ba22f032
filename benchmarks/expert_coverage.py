"""Coverage, stability and overlap of recorded expert traces -> benchmarks/results/expert_coverage.json

python benchmarks/expert_coverage.py TRACE [TRACE...] --source "whose traces, licence"

Traces are folders of `mlx_spark trace-experts` or CSV files. Only aggregates are written, never a trace.
"""
import argparse
from pathlib import Path

import numpy as np

import mlx_spark  # noqa: F401
from mlx_spark.core import save_result
from mlx_spark.expert_trace import DECODE, PREFILL, analyze, measure_disk, read_trace, report, routed_tokens, window_jaccard

SEED = 0
PHASES = {"decode": DECODE, "prefill": PREFILL, "all": None}
KEPT = ("layer", "n_experts", "experts_for", "touched", "entropy_bits", "held_out_coverage", "stability", "stability_shuffled", "overlap",
        "overlap_shuffled", "counts")
WINDOW_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024)

def steady_jaccard(trace, domain, n_layers=8, repeats=4):
    """Stability that a router with the trace's own frequencies and no drift would show, for several window lengths.

    K experts are drawn for each token in proportion to their counts (Gumbel top-k); never-used experts stay unused, so the true value is
    somewhat lower. Mean over layers.
    """
    rng, out = np.random.default_rng(SEED), {}
    tokens = routed_tokens(trace, domain=domain, phase=DECODE)
    tokens = tokens[::max(1, len(tokens) // n_layers)]
    for n in WINDOW_TOKENS:
        values = []
        for used, _ in tokens:
            K, p = int(used[0].sum()), np.maximum(used.sum(0), 1e-9)
            for _ in range(repeats):
                noise = np.log(p) + rng.gumbel(size=(2 * n, len(p)))
                drawn = np.zeros(noise.shape, bool)
                np.put_along_axis(drawn, np.argpartition(-noise, K, axis=1)[:, :K], True, 1)
                values.append(window_jaccard(drawn, n_windows=2, rng=rng)[0, 1])
        out[str(n)] = float(np.mean(values))
    return out

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--source", required=True, help="where the traces come from")
    parser.add_argument("--out", default=Path(__file__).parent / "results" / "expert_coverage.json")
    args = parser.parse_args()
    rates = [measure_disk(Path(args.out).parent, n_bytes=256 << 20) for _ in range(5)]
    traces = [read_trace(path) for path in args.traces]
    found = {name: analyze(traces, disk_bytes_per_s=float(np.median(rates)), phase=phase) for name, phase in PHASES.items()}
    print(report(found["decode"]))
    steady = {t["task"]: steady_jaccard(trace, t["domain"]) for trace, t in zip(traces, found["decode"]["tasks"])}
    for name, analysis in found.items():
        for task in analysis["tasks"]:
            layers = task.pop("layers")
            if name == "decode": task["layers"] = [{k: l[k] for k in KEPT} for l in layers]
    save_result(args.out, dict(
        source=args.source, decode=found["decode"], other_phases={k: found[k] for k in ("prefill", "all")}, steady_jaccard=steady,
        note="one prompt and 128 decoded tokens a trace: short, scripted runs"),
        seeds=[SEED], samples={"disk_bytes_per_s": rates})

if __name__ == "__main__": main()
