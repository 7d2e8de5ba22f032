"""How well the shipped drafter of SmolLM2-135M knows what will be accepted, before and after temperature scaling.

Blocks come from real verify rounds on prompts written for this purpose; those of even number fit the temperatures, those of
odd number judge them. Collecting can be stopped and continued; the report takes what is there.

    python benchmarks/calibrate_smollm2.py collect --temp 0 --raw DIR [--prompts 96] [--max-tokens 64]
    python benchmarks/calibrate_smollm2.py report --raw DIR [--out benchmarks/results/smollm2_calibration.json]
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("phase", choices=("collect", "report"))
    parser.add_argument("--raw", type=Path, required=True)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=HERE / "results/smollm2_calibration.json")
    args = parser.parse_args()
    collect_prompts(args) if args.phase == "collect" else report(args)
