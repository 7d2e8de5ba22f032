"""Aggregate tokens/s of R requests that decode together: plain, fixed draft lengths, scheduled, and mlx-lm's own batch -> results/batch_smollm2.json

  python benchmarks/batch_smollm2.py --eval FOLDER_OF_PROMPT_FILES [--rows 1 2 4 8 16] [--repeats 3] [--max-tokens 64] [--seconds 330]

Resumable: each (R, way, repeat) is kept in --parts as it is done; a run stops before `--seconds` are over, and the next goes on.
End-of-text tokens do not end an answer here, so that every way decodes R x max_tokens tokens; prefill is not counted.
"""
import argparse, json, sys, time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import mlx_spark
import mlx.core as mx
import numpy as np
from mlx_lm import batch_generate as mlx_lm_batch

from mlx_spark import load, load_drafter
from mlx_spark.bench import chat_ids
from mlx_spark.core import save_result, write_atomic
from mlx_spark.data import read_prompts
from mlx_spark.serve_loop import Request, ServeLoop

SETS = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")
WAYS = ("plain", "fixed 7", "fixed 2", "scheduled", "mlx-lm")

def one_loop(model, tokenizer, drafter, way, prompts, max_tokens, max_rows):
    fixed = {"plain": 0, "fixed 7": 7, "fixed 2": 2, "scheduled": None}[way]
    loop = ServeLoop(model, tokenizer, draft_model=None if way == "plain" else drafter, num_draft_tokens=fixed, max_rows=max_rows, prefill_step_size=100_000)
    ids = [loop.submit(Request(p, max_tokens, stop_tokens=frozenset())) for p in prompts]
    out, stats, tic, n_parked = {i: [] for i in ids}, [], time.perf_counter(), 0
    while loop.busy:
        for e in loop.step():
            out[e.id] += e.tokens
            if e.stats: stats.append(e.stats)
        n_parked += loop.parked
    seconds = time.perf_counter() - tic - sum(s.prefill_s for s in stats)
    c = loop.counters
    loop.close()
    return {"seconds": seconds, "tokens": c["tokens"], "rounds": c["rounds"], "parked_rounds": n_parked, "drafted": c["drafted"], "accepted": c["accepted"],
            "verify_lengths": c["verify_lengths"], "tau": c["tokens"] / sum(s.n_rounds for s in stats)}, list(out.values())

def one_mlx_lm(model, tokenizer, prompts, max_tokens):
    plain, n = type(tokenizer)(tokenizer._tokenizer, tokenizer._detokenizer.__class__, eos_token_ids=[]), len(prompts)
    plain._eos_token_ids = {10**9}
    r = mlx_lm_batch(model, plain, prompts, max_tokens=max_tokens, return_token_ids=True)
    return {"seconds": r.stats.generation_time, "tokens": r.stats.generation_tokens}, r.token_ids

if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--eval", required=True); p.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16]); p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--note"); p.add_argument("--ways", nargs="+", default=WAYS); p.add_argument("--max-tokens", type=int, default=64); p.add_argument("--seconds", type=float, default=330)
    p.add_argument("--parts", default="batch_smollm2.parts.jsonl"); p.add_argument("--out", default=str(Path(__file__).parent / "results/batch_smollm2.json"))
    a = p.parse_args()
    start, parts = time.monotonic(), Path(a.parts)
    done = [json.loads(line) for line in parts.read_text().splitlines()] if parts.exists() else []
    have = {(d["R"], d["way"], d["repeat"]) for d in done}
    todo = [(R, way, repeat) for repeat in range(a.repeats) for R in a.rows for way in a.ways if (R, way, repeat) not in have]
    if todo:
        model, tokenizer = load("smollm2-135m")
        drafter = load_drafter("smollm2-135m-dspark", model)
        texts = [read_prompts(Path(a.eval) / f"{SETS[i % len(SETS)]}.jsonl")[i // len(SETS)][0] for i in range(max(a.rows))]
        prompts = [chat_ids(tokenizer, text) for text in texts]
        ServeLoop(model, tokenizer, draft_model=drafter, max_rows=max(a.rows)).close()   # takes the profile of this machine, if there's none
        one_loop(model, tokenizer, drafter, "fixed 7", prompts[:2], 8, 2)
    for R, way, repeat in todo:
        if time.monotonic() - start > a.seconds - 40: break
        if way == "mlx-lm": row, ids = one_mlx_lm(model, tokenizer, prompts[:R], a.max_tokens)
        else: row, ids = one_loop(model, tokenizer, drafter, way, prompts[:R], a.max_tokens, max(a.rows))
        row |= {"R": R, "way": way, "repeat": repeat, "tok_s": row["tokens"] / row["seconds"], "ids": ids}
        done.append(row)
        with parts.open("a") as f: f.write(json.dumps(row) + "\n")
        print(R, way, repeat, {k: v for k, v in row.items() if k != "ids"}, flush=True)
    if any((R, way, r) not in {(d["R"], d["way"], d["repeat"]) for d in done} for r in range(a.repeats) for R in a.rows for way in a.ways): sys.exit("not finished: run it again")
    if not todo: model, tokenizer = load("smollm2-135m")
    if not todo: drafter = load_drafter("smollm2-135m-dspark", model)
    costs = asdict(ServeLoop(model, tokenizer, draft_model=drafter, max_rows=max(a.rows)).planner.costs)
    rows = []
    for R in a.rows:
        tps = {way: [d["tok_s"] for d in done if (d["R"], d["way"]) == (R, way)] for way in a.ways}
        first = {way: next(d for d in done if (d["R"], d["way"]) == (R, way)) for way in a.ways}
        same = {way: all(x == y for x, y in zip(first["plain"]["ids"], first[way]["ids"])) for way in a.ways}
        best = max(np.median(tps[w]) for w in a.ways if w not in ("scheduled", "mlx-lm"))
        rows.append({"R": R, "tok_s": {w: float(np.median(v)) for w, v in tps.items()}, "ids_match": same, "tau": {w: first[w].get("tau") for w in a.ways},
                     "verify_lengths": first["scheduled"]["verify_lengths"], "parked_rounds": first["scheduled"]["parked_rounds"], "rounds": first["scheduled"]["rounds"],
                     "scheduled_over_best": float(np.median(tps["scheduled"]) / best)})
        print(rows[-1])
    samples = [{k: v for k, v in d.items() if k != "ids"} for d in done]
    save_result(a.out, {"model": "smollm2-135m", "draft_model": "smollm2-135m-dspark", "dtype": "float32", "max_tokens": a.max_tokens, "costs": costs, "note": a.note, "rows": rows}, seeds=[0], samples=samples)
