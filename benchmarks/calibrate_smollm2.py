"""How well the shipped drafter of SmolLM2-135M knows what will be accepted, before and after temperature scaling.

Blocks come from real verify rounds on prompts written for this purpose. Each half of the prompts is judged by temperatures
(STS, the paper's method) or by temperatures and offsets (ours) fitted on the other half; those reported are fitted on all.
Collecting can be stopped and continued; the report takes what is there. At temperature 0 `replay` collects the same
blocks several times faster. `stamp` writes temperatures and offsets for one serving temperature into a drafter's folder.

    python benchmarks/calibrate_smollm2.py replay --raw DIR [--prompts 400] [--max-tokens 64]
    python benchmarks/calibrate_smollm2.py collect --temp 1 --raw DIR [--prompts 96] [--max-tokens 64]
    python benchmarks/calibrate_smollm2.py report --raw DIR [--out benchmarks/results/smollm2_calibration.json]
    python benchmarks/calibrate_smollm2.py stamp --temp 0 --folder mlx_spark/drafters/smollm2-135m-dspark
"""
import argparse
import json
import random
from pathlib import Path

import mlx_spark
import numpy as np

HERE = Path(__file__).parent
FRAMES = {
    "chat": ["Write a short {text} about {topic}.", "Explain {topic} to a child.", "Give me five tips about {topic}.",
             "What are the advantages and disadvantages of {topic}?", "Tell me something surprising about {topic}.",
             "Why do people care about {topic}?", "Help me write a {text} on {topic}."],
    "math": ["{name} has {a} apples and buys {b} more bags with {c} apples each. How many apples are there now?",
             "A ticket costs {a} dollars. {name} pays for {b} people and gets a discount of {c} percent. What is the price?",
             "What is {a} times {b} plus {c}?", "Solve for x: {c}x + {a} = {b}{a}.",
             "{name} reads {c} pages a day. How many days does a book of {b}{a} pages take?",
             "A rectangle is {a} cm long and {b} cm wide. What are its area and its perimeter?"],
    "code": ["Write a python function to {task} {of} numbers in a list.", "Write a function that {task}s {of} words of a text.",
             "How do I {task} {of} keys of a dictionary in Python?", "Write a unit test for a function that {task}s a string.",
             "Explain, with an example, how to {task} a list in Python."]}


def prompt_text(i: int) -> str:
    "The i-th prompt; the three domains take turns in pairs, so that even and odd numbers see all of them."
    from mlx_spark.data import WORDS
    rng, domain = random.Random(1000 + i), list(FRAMES)[i // 2 % 3]
    words = {k: rng.choice(v) for k, v in WORDS.items()} | {k: rng.randint(2, 40) for k in "abc"}
    return rng.choice(FRAMES[domain]).format(**words)


def save_blocks(folder: Path, temp: float, i: int, blocks) -> None:
    "The file of one prompt."
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"{temp:g}_{i:03}.npz", logits=blocks.logits, accept=blocks.accept, lengths=blocks.lengths)
    print(i, len(blocks.lengths), flush=True)


def replay(drafter, rows, first: list[int], gamma: int) -> list:
    """Blocks of greedy rounds on answers that are known: `rows` are (tokens of prompt and answer, -1 behind a stop token; taps
    (1, T, m*H)), `first` the numbers of prompt tokens. The rounds are those of `collect`, for anchors, lengths and context
    depend on the answer alone."""
    import mlx.core as mx
    from mlx_spark.calibration import Blocks, to_logits
    config, at, out = drafter.config, list(first), [[] for _ in rows]
    last = [tokens.index(-1) - 1 if -1 in tokens else len(tokens) for tokens, _ in rows] # where a stop token is
    cache, seen = drafter.make_cache(len(rows)), [0] * len(rows)
    while True:
        new = [max(a - s, 0) for a, s in zip(at, seen)]
        pad = lambda taps, s, n: mx.pad(taps[:, s:s + n], ((0, 0), (0, max(new) - n), (0, 0)))
        if max(new): drafter.extend(mx.concatenate([pad(taps, s, n) for (_, taps), s, n in zip(rows, seen, new)]), cache, new)
        seen = [s + n for s, n in zip(seen, new)]
        live = [a < min(end, len(tokens) - 2) for (tokens, _), a, end in zip(rows, at, last)]
        if not any(live): break
        anchor = mx.array([tokens[a] for (tokens, _), a in zip(rows, at)], dtype=mx.uint32)
        draft = drafter.draft(anchor, cache, gamma, want_confidence=True)
        for b, (ids, z) in enumerate(zip(draft.tokens.tolist(), to_logits(np.array(draft.confidence), config.calibration))):
            if not live[b]: continue
            tokens, a = rows[b][0], at[b]
            n = min(gamma, len(tokens) - 2 - a)    # the last token of an answer is never drafted for
            hits = int(np.cumprod([x == y for x, y in zip(ids[:n], tokens[a + 1:])]).sum())
            if a + hits == last[b]: n = hits       # behind an accepted stop token nothing is known
            out[b].append((np.where(np.arange(gamma) < n, z, 0), np.arange(gamma) < hits, n))
            at[b] = min(a + hits + 1, last[b], len(tokens) - 1)
    return [Blocks(*map(np.array, zip(*found)), np.zeros(len(found))) for found in out]


def replay_prompts(args) -> None:
    "T = 0 several times faster: answers decoded in a batch, then the rounds that would have decoded them."
    import mlx.core as mx
    from mlx_lm.generate import batch_generate
    from mlx_spark import load
    from mlx_spark.bench import chat_ids
    from mlx_spark.dspark import load_drafter
    from mlx_spark.taps import Taps
    from mlx_spark.targets import parts
    model, tokenizer = load("smollm2-135m", dtype=mx.float32)
    drafter = load_drafter("smollm2-135m-dspark", model)
    todo = [i for i in range(args.first, args.prompts) if not (args.raw / f"0_{i:03}.npz").exists()]
    for start in range(0, len(todo), args.batch):
        some = todo[start:start + args.batch]
        prompts = [chat_ids(tokenizer, prompt_text(i)) for i in some]
        answers = batch_generate(model, tokenizer, prompts, max_tokens=args.max_tokens, return_token_ids=True).token_ids
        rows = []
        for prompt, answer in zip(prompts, answers):
            missing = args.max_tokens - len(answer)
            with Taps(model, drafter.config.target_layer_ids) as taps:
                parts(model).decoder(mx.array([prompt + answer]))
                rows.append((prompt + answer + ([tokenizer.eos_token_id] + [-1] * (missing - 1) if missing else []), taps.take()))
            mx.eval(rows[-1][1])
        for i, blocks in zip(some, replay(drafter, rows, [len(p) for p in prompts], drafter.config.block_size)):
            save_blocks(args.raw, 0.0, i, blocks)


def collect_prompts(args) -> None:
    "One file of blocks a prompt; those that exist are left alone."
    import mlx.core as mx
    from mlx_spark import load
    from mlx_spark.bench import chat_ids
    from mlx_spark.calibration import collect
    from mlx_spark.dspark import load_drafter
    from mlx_spark.verify import Sampling
    model, tokenizer = load("smollm2-135m", dtype=mx.float32)
    drafter, stop = load_drafter("smollm2-135m-dspark", model), frozenset(tokenizer.eos_token_ids)
    for i in range(args.first, args.prompts):
        path = args.raw / f"{args.temp:g}_{i:03}.npz"
        if path.exists(): continue
        blocks = collect(model, drafter, [chat_ids(tokenizer, prompt_text(i))], sampling=Sampling(temp=args.temp),
                         max_tokens=args.max_tokens, stop=stop, seed=i)
        save_blocks(args.raw, args.temp, i, blocks)


def read_blocks(folder: Path, temp: float):
    "All blocks collected at a temperature."
    from mlx_spark.calibration import Blocks
    files = sorted(folder.glob(f"{temp:g}_*.npz"))
    if not files: raise FileNotFoundError(f"no blocks of temperature {temp:g} in {folder}")
    parts = [(np.load(f), int(f.stem.split("_")[1])) for f in files]
    prompt = np.concatenate([np.full(len(p["lengths"]), i) for p, i in parts])
    return Blocks(*(np.concatenate([p[k] for p, _ in parts]) for k in ("logits", "accept", "lengths")), prompt)


def cross_fitted(blocks, fit) -> np.ndarray: # (N, gamma)
    "Survival of each block, with `fit(logits, accept, lengths)` done on the other half of the prompts."
    from mlx_spark.calibration import survival
    out = np.zeros_like(blocks.logits)
    for half in (0, 1):
        other = blocks.of(blocks.prompt % 2 != half)
        mine = blocks.prompt % 2 == half
        out[mine] = survival(blocks.logits[mine], *fit(other.logits, other.accept, other.lengths))
    return out


def judge(pred: np.ndarray, blocks) -> dict:
    "Errors and diagram of every position."
    from mlx_spark.calibration import measure_positions
    found = measure_positions(pred, blocks.accept, blocks.lengths)
    plain = lambda x: [None if np.isnan(v) else round(float(v), 5) for v in x]
    bins = [{"pred": plain(p.bins.pred), "target": plain(p.bins.target), "count": p.bins.count.tolist()} for p in found]
    return {name: plain([getattr(p, name) for p in found]) for name in ("ece", "auc", "brier")} | {"bins": bins}


def report(args) -> None:
    "Fit, judge, save."
    from mlx_spark.calibration import chance_ece, fit_affine, fit_temps, mean_of, survival
    from mlx_spark.core import save_result
    results, samples, fits, all_blocks = {}, {}, {}, {t: read_blocks(args.raw, t) for t in (0.0, 1.0)}
    for temp, b in all_blocks.items():
        fits[temp] = fit_temps(b.logits, b.accept, b.lengths)
        both = cross_fitted(b, fit_affine)
        before, after = judge(survival(b.logits), b), judge(cross_fitted(b, lambda *x: [fit_temps(*x).temps]), b)
        affine, floor = judge(both, b), chance_ece(both, b.lengths, draws=200)
        affine["temps"], affine["offsets"] = fit_affine(b.logits, b.accept, b.lengths)
        results[f"T={temp:g}"] = {
            "temp": temp, "temps": fits[temp].temps.tolist(), "at_edge": fits[temp].at_edge, "prompts": len(set(b.prompt.tolist())),
            "blocks": [int((b.lengths > k).sum()) for k in range(7)], "before": before, "after": after,
            "affine": affine, "floor": floor,
            "mean_ece": {"before": mean_of(before["ece"]), "after": mean_of(after["ece"]), "affine": mean_of(affine["ece"]),
                         "floor": float(floor.mean())}}
        samples[f"T={temp:g}"] = {"logits": b.logits.round(3), "n_accepted": b.accept.sum(axis=1), "lengths": b.lengths, "prompt": b.prompt}
    for temp, other in ((0.0, 1.0), (1.0, 0.0)):
        wrong = judge(survival(all_blocks[temp].logits, fits[other].temps), all_blocks[temp])
        results[f"T={temp:g}"]["mean_ece"][f"with the temperatures of T={other:g}"] = mean_of(wrong["ece"])
    data = {"model": "smollm2-135m", "drafter": "smollm2-135m-dspark", "dtype": "float32", "max_tokens": args.max_tokens, "results": results}
    save_result(args.out, data, seeds=[0], samples=samples)
    print(json.dumps({k: r["mean_ece"] | {"temps": np.round(r["temps"], 2).tolist(), "blocks": r["blocks"]} for k, r in results.items()}, indent=1))


def stamp_folder(args) -> None:
    "Temperatures and offsets of the results file into a drafter's config.json."
    from mlx_spark.calibration import stamp
    r = json.loads(args.out.read_text())["results"][f"T={args.temp:g}"]
    numbers = {name: np.round(np.array(r["affine"][name], dtype=float), 4).tolist() for name in ("temps", "offsets")}
    stamp(args.folder, numbers | {"temp": r["temp"], "blocks": r["blocks"], "ece_before": r["before"]["ece"],
                                  "ece_sts": r["after"]["ece"], "ece_after": r["affine"]["ece"]})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("phase", choices=("collect", "replay", "report", "stamp"))
    parser.add_argument("--raw", type=Path, help="folder of collected blocks")
    parser.add_argument("--folder", type=Path, help="drafter to stamp")
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--first", type=int, default=0, help="number of the first prompt")
    parser.add_argument("--batch", type=int, default=16, help="prompts decoded together by replay")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=HERE / "results/smollm2_calibration.json")
    args = parser.parse_args()
    {"collect": collect_prompts, "replay": replay_prompts, "report": report, "stamp": stamp_folder}[args.phase](args)
