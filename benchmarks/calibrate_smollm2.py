"""How well the shipped drafter of SmolLM2-135M knows what will be accepted, before and after temperature scaling.

Blocks come from real verify rounds on prompts written for this purpose. Each half of the prompts is judged by temperatures
fitted on the other half; the temperatures reported are fitted on all. Collecting can be stopped and continued; the report
takes what is there. `stamp` writes the temperatures for one serving temperature into a drafter's folder.

    python benchmarks/calibrate_smollm2.py collect --temp 0 --raw DIR [--prompts 96] [--max-tokens 64]
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
    for i in range(args.prompts):
        path = args.raw / f"{args.temp:g}_{i:03}.npz"
        if path.exists(): continue
        blocks = collect(model, drafter, [chat_ids(tokenizer, prompt_text(i))], sampling=Sampling(temp=args.temp),
                         max_tokens=args.max_tokens, stop=stop, seed=i)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, logits=blocks.logits, accept=blocks.accept, lengths=blocks.lengths)
        print(i, len(blocks.lengths), flush=True)


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
        samples[f"T={temp:g}"] = {"logits": b.logits.round(4), "n_accepted": b.accept.sum(axis=1), "lengths": b.lengths, "prompt": b.prompt}
    for temp, other in ((0.0, 1.0), (1.0, 0.0)):
        wrong = judge(survival(all_blocks[temp].logits, fits[other].temps), all_blocks[temp])
        results[f"T={temp:g}"]["mean_ece"][f"with the temperatures of T={other:g}"] = mean_of(wrong["ece"])
    data = {"model": "smollm2-135m", "drafter": "smollm2-135m-dspark", "dtype": "float32", "max_tokens": args.max_tokens, "results": results}
    save_result(args.out, data, seeds=[0], samples=samples)
    print(json.dumps({k: r["mean_ece"] | {"temps": np.round(r["temps"], 2).tolist(), "blocks": r["blocks"]} for k, r in results.items()}, indent=1))


def stamp_folder(args) -> None:
    "Temperatures of the results file into a drafter's config.json."
    from mlx_spark.calibration import stamp
    r = json.loads(args.out.read_text())["results"][f"T={args.temp:g}"]
    stamp(args.folder, {"temps": r["temps"], "temp": r["temp"], "blocks": r["blocks"], "ece_before": r["before"]["ece"], "ece_after": r["after"]["ece"]})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("phase", choices=("collect", "report", "stamp"))
    parser.add_argument("--raw", type=Path, help="folder of collected blocks")
    parser.add_argument("--folder", type=Path, help="drafter to stamp")
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=HERE / "results/smollm2_calibration.json")
    args = parser.parse_args()
    {"collect": collect_prompts, "report": report, "stamp": stamp_folder}[args.phase](args)
