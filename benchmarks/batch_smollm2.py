"""Aggregate tokens/s of R requests that decode together: plain, fixed draft lengths, scheduled, and mlx-lm's own batch -> results/batch_smollm2.json

  python benchmarks/batch_smollm2.py --eval FOLDER_OF_PROMPT_FILES [--rows 1 2 4 8 16] [--repeats 2] [--max-tokens 64] [--seconds 330]

Two measures. *Full*: --turns x R requests, a new one joining as another ends; tokens over time of all rounds with R rows. *At once*: R requests
begun together as `batch_generate` does, R x max_tokens tokens over the time until the last is done. End-of-text tokens do not end an answer here; prefill is not counted.
The ways take turns, a round each, whichever has had the least time so far: a slow minute of the machine is shared by all.
Resumable: each (R, measure, repeat) is kept in --parts as it is done; a run stops before `--seconds` are over, and the next goes on.
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
from mlx_spark.core import save_result
from mlx_spark.data import read_prompts
from mlx_spark.serve_loop import Request, ServeLoop, admit, leave, run_round

SETS = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")
FIXED = {"plain": 0, "fixed 7": 7, "fixed 4": 4, "fixed 2": 2, "scheduled": None}

class Way:
    "One loop, its rounds as (rows, tokens, ms), and its answers."
    def __init__(self, name, model, tokenizer, drafter, prompts, max_tokens, max_rows, R, closed):
        draft_model = None if name == "plain" else drafter
        self.loop = ServeLoop(model, tokenizer, draft_model=draft_model, num_draft_tokens=FIXED[name], max_rows=max_rows, prefill_step_size=100_000, closed=closed)
        self.loop.max_rows, self.rounds, self.n_parked, self.ms = R, [], 0, 0.0
        self.out = {self.loop.submit(Request(p, max_tokens, stop_tokens=frozenset())): [] for p in prompts}

    def step(self):
        loop = self.loop
        admit(loop)
        n, before, tic = len(loop.rows), loop.counters["tokens"], time.perf_counter()
        for e in run_round(loop): self.out[e.id] += e.tokens
        leave(loop, [row for row in loop.rows if row.finish is not None])
        ms = 1e3 * (time.perf_counter() - tic)
        self.rounds.append((n, loop.counters["tokens"] - before, round(ms, 1)))
        self.ms, self.n_parked = self.ms + ms, self.n_parked + loop.parked

    def result(self, rows):
        "Of the rounds with at least so many rows."
        rounds, c = [r for r in self.rounds if r[0] >= rows], self.loop.counters
        return {"tok_s": 1e3 * sum(r[1] for r in rounds) / sum(r[2] for r in rounds), "rounds": len(self.rounds), "parked_rounds": self.n_parked,
                **{k: c[k] for k in ("drafted", "accepted", "verify_lengths")}, "round_tokens_ms": [r[1:] for r in rounds]}

def side_by_side(names, R, rows, *how):
    ways = {name: Way(name, *how, R, closed=rows < R) for name in names}
    while any(w.loop.busy for w in ways.values()): min((w for w in ways.values() if w.loop.busy), key=lambda w: w.ms).step()
    for w in ways.values(): w.loop.close()
    return {name: w.result(rows) for name, w in ways.items()}, {name: list(w.out.values()) for name, w in ways.items()}

def one_mlx_lm(model, tokenizer, prompts, max_tokens):
    plain = type(tokenizer)(tokenizer._tokenizer, tokenizer._detokenizer.__class__, eos_token_ids=[])
    plain._eos_token_ids = {10**9}
    r = mlx_lm_batch(model, plain, prompts, max_tokens=max_tokens, return_token_ids=True)
    return {"tok_s": r.stats.generation_tokens / r.stats.generation_time}, r.token_ids

if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--eval", required=True); p.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16]); p.add_argument("--repeats", type=int, default=2)
    p.add_argument("--model", default="smollm2-135m"); p.add_argument("--draft-model", default="smollm2-135m-dspark"); p.add_argument("--dtype"); p.add_argument("--note")
    p.add_argument("--max-tokens", type=int, default=64); p.add_argument("--turns", type=int, default=3); p.add_argument("--seconds", type=float, default=330)
    p.add_argument("--measures", nargs="+", default=["full", "at once"]); p.add_argument("--max-rows", type=int)
    p.add_argument("--parts", default="batch_smollm2.parts.jsonl"); p.add_argument("--out", default=str(Path(__file__).parent / "results/batch_smollm2.json"))
    a = p.parse_args()
    start, parts, max_rows = time.monotonic(), Path(a.parts), a.max_rows or max(a.rows)
    done = [json.loads(line) for line in parts.read_text().splitlines()] if parts.exists() else []
    have = {(d["R"], d["measure"], d["repeat"]) for d in done}
    todo = [(R, measure, repeat) for repeat in range(a.repeats) for R in a.rows for measure in a.measures if (R, measure, repeat) not in have]
    model, tokenizer = load(a.model, dtype=a.dtype and getattr(mx, a.dtype))
    drafter = load_drafter(a.draft_model, model)
    costs = ServeLoop(model, tokenizer, draft_model=drafter, max_rows=max_rows).planner.costs   # takes the profile of this machine, if there's none
    texts = [read_prompts(Path(a.eval) / f"{SETS[i % len(SETS)]}.jsonl")[i // len(SETS)][0] for i in range(a.turns * max(a.rows))]
    prompts = [chat_ids(tokenizer, text) for text in texts]
    how, longest = (model, tokenizer, drafter), 0.0
    if todo: side_by_side(["fixed 7"], 2, 0, *how, prompts[:2], 8, max_rows)
    for R, measure, repeat in todo:
        tic = time.monotonic()
        if tic - start + longest > a.seconds: sys.exit("not finished: run it again")
        n = a.turns * R if measure == "full" else R
        found, ids = side_by_side(FIXED, R, R if measure == "full" else 1, *how, prompts[:n], a.max_tokens, max_rows)
        if measure == "at once": found["mlx-lm"], ids["mlx-lm"] = one_mlx_lm(model, tokenizer, prompts[:R], a.max_tokens)
        same = {way: sum(x != y for x, y in zip(ids["plain"], other)) for way, other in ids.items()}
        others = [x["tok_s"] for way, x in found.items() if way in FIXED and way != "scheduled"]
        row = {"R": R, "measure": measure, "repeat": repeat, "answers": n, "answers_that_differ": same, "scheduled_over_best": found["scheduled"]["tok_s"] / max(others), "ways": found}
        done.append(row)
        with parts.open("a") as f: f.write(json.dumps(row) + "\n")
        longest = max(longest, time.monotonic() - tic)
        print(R, measure, repeat, {k: round(v["tok_s"], 1) for k, v in found.items()}, round(row["scheduled_over_best"], 3), same, flush=True)
    rows = []
    for R in a.rows:
        for measure in a.measures:
            mine = [d for d in done if (d["R"], d["measure"]) == (R, measure)]
            rows.append({"R": R, "measure": measure, "tok_s": {w: float(np.median([d["ways"][w]["tok_s"] for d in mine])) for w in mine[0]["ways"]},
                         "ids_match": {w: not any(d["answers_that_differ"][w] for d in mine) for w in mine[0]["ways"]},
                         **{k: mine[0]["ways"]["scheduled"][k] for k in ("verify_lengths", "parked_rounds", "rounds")},
                         "scheduled_over_best": float(np.median([d["scheduled_over_best"] for d in mine])), "each": [d["scheduled_over_best"] for d in mine]})
            print({k: v for k, v in rows[-1].items() if k not in ("verify_lengths", "ids_match")})
    save_result(a.out, {"model": a.model, "draft_model": a.draft_model, "dtype": str(mx.float32 if a.dtype is None else a.dtype).split(".")[-1], "max_tokens": a.max_tokens, "turns": a.turns,
                        "costs": asdict(costs), "note": a.note, "rows": rows}, seeds=[0], samples=done)
