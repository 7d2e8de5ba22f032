"""Tokens/s of plain and speculative decoding with the shipped drafter, prompt by prompt in one process -> results/smollm2_speed_cpu.json

  python benchmarks/speed_smollm2.py --eval FOLDER_OF_PROMPT_FILES [--n 4] [--max-tokens 128]

The evaluation prompts are not part of this repository: one {"turns": [...]} a line, as the DeepSpec repository ships them.
"""
import argparse, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import mlx_spark
import numpy as np

from mlx_spark import load, load_drafter
from mlx_spark.bench import chat_ids, measure
from mlx_spark.core import save_result
from mlx_spark.data import read_prompts

SETS = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")

if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--eval", required=True); p.add_argument("--n", type=int, default=4); p.add_argument("--max-tokens", type=int, default=128)
    p.add_argument("--out", default=str(Path(__file__).parent / "results/smollm2_speed_cpu.json"))
    a = p.parse_args()
    model, tokenizer = load("smollm2-135m")
    drafter = load_drafter("smollm2-135m-dspark", model)
    rows, samples = [], {}
    for name in SETS:
        prompts = [chat_ids(tokenizer, t[0]) for t in read_prompts(Path(a.eval) / f"{name}.jsonl")[:a.n]]
        r = measure(model, tokenizer, drafter, prompts, max_tokens=a.max_tokens)
        samples[name] = r.pop("rows")
        rows.append({"set": name, "n": len(prompts), **{k: (None if isinstance(v, float) and np.isnan(v) else v) for k, v in r.items() if k != "accept_by_position"}})
        print(rows[-1], flush=True)
    flat = [s for v in samples.values() for s in v]
    spent = lambda n, s: sum(r[n] - 1 for r in flat) / sum(r[s] for r in flat)
    total = {"tok_s": spent("tokens", "seconds"), "plain_tok_s": spent("plain_tokens", "plain_seconds"), "tau_mean": float(np.mean([r["tau"] for r in rows]))}
    total["speedup"] = total["tok_s"] / total["plain_tok_s"]
    total["median_speedup"] = float(np.median([r["tok_s"] / r["plain_tok_s"] for r in flat]))
    total["ids_match"] = all(r["ids_match"] for r in rows)
    print(total)
    save_result(a.out, {"model": "smollm2-135m", "draft_model": "smollm2-135m-dspark", "dtype": "float32", "max_tokens": a.max_tokens, "rows": rows, **total}, seeds=[0], samples=samples)
