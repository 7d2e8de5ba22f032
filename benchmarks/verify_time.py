"""Time of one target pass against its number of tokens, with MLX's own BLAS and with the one that mlx_spark loads first.

A process can have only one BLAS, so each is measured in a process of its own; the two alternate, round by round, so that
other load on the machine falls on both alike. Writes benchmarks/results/verify_time.json.

    python benchmarks/verify_time.py [--rounds 3] [--repeats 5] [--out FILE]
"""
import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import mlx_spark

TOKENS = [1, 2, 3, 4, 6, 8, 12, 16]
CONTEXT = 64


def measure(repeats: int) -> dict:
    "Milliseconds of a pass over each of TOKENS behind a context of CONTEXT tokens, (len(TOKENS), repeats)."
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
    from mlx_spark.targets import load
    mx.set_default_device(mx.cpu)
    model, tokenizer = load("smollm2-135m", dtype=mx.float32)
    ids = mx.random.randint(10, len(tokenizer), (1, CONTEXT + max(TOKENS)), key=mx.random.key(0))
    cache = make_prompt_cache(model)
    mx.eval(model(ids[:, :CONTEXT], cache=cache))
    def one_pass(n: int) -> float:
        start = time.perf_counter()
        mx.eval(model(ids[:, CONTEXT:CONTEXT + n], cache=cache))
        ms = 1e3 * (time.perf_counter() - start)
        trim_prompt_cache(cache, n)
        return ms
    for n in TOKENS: one_pass(n)
    rounds = [[one_pass(n) for n in TOKENS] for _ in range(repeats)]
    return {"blas": mlx_spark.blas_in_use(), "ms": [list(ms) for ms in zip(*rounds)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="processes for each library")
    parser.add_argument("--repeats", type=int, default=5, help="passes of each length in a process")
    parser.add_argument("--out", default=Path(__file__).parent / "results" / "verify_time.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child: return print(json.dumps(measure(args.repeats)))
    if mlx_spark.blas_in_use() == "reference BLAS": sys.exit(f"there is nothing to compare with: {mlx_spark.blas_advice()}")
    found: dict[str, list] = {}
    for i in range(args.rounds):
        for choice in ("off", os.environ.get("MLX_SPARK_BLAS", "")):
            command = [sys.executable, __file__, "--child", "--repeats", str(args.repeats)]
            done = subprocess.run(command, env=os.environ | {"MLX_SPARK_BLAS": choice}, stdout=subprocess.PIPE, text=True, check=True)
            run = json.loads(done.stdout.splitlines()[-1])
            before = found.setdefault(run["blas"], [[] for _ in TOKENS])
            for kept, new in zip(before, run["ms"]): kept.extend(new)
            print(f"round {i + 1}/{args.rounds}: {run['blas']}", file=sys.stderr)
    from mlx_spark.core import save_result
    data = {"model": "smollm2-135m", "dtype": "float32", "context": CONTEXT, "tokens": TOKENS}
    save_result(args.out, data, seeds=[0], samples=[{"blas": blas, "ms": ms} for blas, ms in found.items()])


if __name__ == "__main__": main()
