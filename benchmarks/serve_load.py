"""Requests/s and time to first token of `mlx_spark serve` at 1, 4 and 16 clients, with and without drafter -> results/serve_load.json

  python benchmarks/serve_load.py --eval FOLDER_OF_PROMPT_FILES [--max-tokens 40] [--raw FOLDER]

One server process for each row; every client asks one question after another and reads the stream. Each row is kept in --raw as soon as it is there,
so a run that was stopped goes on. The evaluation prompts are not part of this repository: one {"turns": [...]} a line, as the DeepSpec repository ships them.
"""
import argparse, json, sys, tempfile, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import mlx_spark
import httpx
import numpy as np
from server_process import ServerProcess

from mlx_spark.core import save_result, write_atomic
from mlx_spark.data import read_prompts

SETS = ("gsm8k", "humaneval", "mt-bench", "mbpp")
CLIENTS = {1: 4, 4: 12, 16: 24}   # requests of each row, the same ones from the start of one list
DRAFTERS = ("none", "smollm2-135m-dspark")


def ask(http, url, question, n, zero):
    "One streamed request: when its pieces came, in seconds since `zero`, and the server's own account."
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": n, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    begun, times, counts, ids, last = time.perf_counter() - zero, [], [], [], None
    with http.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"): continue
            piece = json.loads(line[6:])
            if piece.get("usage"): last = piece
            elif new := piece["choices"][0].get("token_ids"):
                times.append(round(time.perf_counter() - zero, 4)); counts.append(len(new)); ids += new
    return {"begun_s": round(begun, 4), "piece_s": times, "piece_tokens": counts, "ids": ids, "usage": last["usage"], "timings": last["timings"]}


def measure(drafter, clients, questions, n, max_rows):
    "One row: a server of its own, warmed up by one request for each client."
    with ServerProcess("--draft-model", drafter, "--max-rows", str(max_rows), "--prompt-cache-gb", "0", "--quiet") as server, ThreadPoolExecutor(clients) as pool:
        with httpx.Client(timeout=600, limits=httpx.Limits(max_connections=64)) as http:
            list(pool.map(lambda i: ask(http, server.url, f"Say {i}.", 8, 0.0), range(clients)))
            zero = time.perf_counter()
            found = list(pool.map(lambda q: ask(http, server.url, q, n, zero), questions))
            wall = time.perf_counter() - zero
        assert server.stop() == 0
    return {"drafter": drafter, "clients": clients, "max_rows": max_rows, "wall_s": wall, "requests": found}


def row(r):
    "What a row comes to."
    first = [q["piece_s"][0] - q["begun_s"] for q in r["requests"]]
    tokens = sum(len(q["ids"]) for q in r["requests"])
    rounds = sum(q["timings"]["n_rounds"] for q in r["requests"])
    return {"drafter": r["drafter"], "clients": r["clients"], "requests": len(r["requests"]), "requests_s": len(r["requests"]) / r["wall_s"], "tok_s": tokens / r["wall_s"],
            "first_token_s_median": float(np.median(first)), "first_token_s_max": max(first), "tau": tokens / rounds}


def ties(pairs):
    "How many of (question, plain ids, other ids) differ by no more than rounding."
    import mlx.core as mx
    from mlx_spark import load
    from mlx_spark.generate import compare_ids
    model, tokenizer = load("smollm2-135m")
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True) for q, _, _ in pairs]
    return sum(compare_ids(model, mx.array(prompt), plain, other).tie for prompt, (_, plain, other) in zip(prompts, pairs))


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--eval", required=True); p.add_argument("--max-tokens", type=int, default=40); p.add_argument("--max-rows", type=int, default=8)
    p.add_argument("--raw", default=str(Path(tempfile.gettempdir()) / "serve_load")); p.add_argument("--seconds", type=float, default=1e9, help="start no row after so long")
    p.add_argument("--out", default=str(Path(__file__).parent / "results/serve_load.json"))
    a = p.parse_args()
    sets = [read_prompts(Path(a.eval) / f"{name}.jsonl") for name in SETS]
    questions = [sets[i % len(sets)][i // len(sets)][0] for i in range(max(CLIENTS.values()))]
    raw, begun, rows = Path(a.raw), time.monotonic(), []
    raw.mkdir(parents=True, exist_ok=True)
    for clients, n_requests in CLIENTS.items():
        for drafter in DRAFTERS:
            kept = raw / f"{drafter}-{clients}.json"
            if not kept.exists():
                if time.monotonic() - begun > a.seconds: sys.exit(f"stopped before {kept.name}; run again to go on")
                write_atomic(kept, json.dumps(measure(drafter, clients, questions[:n_requests], a.max_tokens, a.max_rows)))
            rows.append(json.loads(kept.read_text()))
            print(row(rows[-1]), flush=True)
    plain = {i: q["ids"] for r in rows if r["drafter"] == "none" and r["clients"] == max(CLIENTS) for i, q in enumerate(r["requests"])}
    differ = [(questions[i], plain[i], q["ids"]) for r in rows for i, q in enumerate(r["requests"]) if q["ids"] != plain[i]]
    n_ties = ties(differ) if differ else 0
    for r in rows:
        for q in r["requests"]: del q["ids"]
    result = {"model": "smollm2-135m", "max_tokens": a.max_tokens, "max_rows": a.max_rows, "rows": [row(r | {"requests": [q | {"ids": range(sum(q["piece_tokens"]))} for q in r["requests"]]}) for r in rows],
              "ids_match": not differ, "ties": n_ties, "mismatches": len(differ) - n_ties}
    print({k: result[k] for k in ("ids_match", "ties", "mismatches")})
    save_result(a.out, result, seeds=[], samples=rows)
