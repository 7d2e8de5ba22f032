"""Draw the figure of README.md, docs/demo.svg, from benchmarks/results/demo.json.

    mlx_spark demo --out benchmarks/results/demo.json     # measure anew
    python docs/figures.py                                # draw
"""
import json
from pathlib import Path

import matplotlib
matplotlib.use("svg")
import matplotlib.pyplot as plt

from mlx_spark.plots import COLORS, use_style

ROOT = Path(__file__).parents[1]


def caption(result: dict) -> str:
    "Under which conditions the data was taken; tests/test_cli.py compares it with the figure."
    env = result["environment"]
    return f"{result['model']}, {result['draft_model']}, {result['dtype']}, greedy, {env['date'][:10]}, {env['commit']}"


def draw(result: dict):
    "Tokens over passes of the target for each prompt of the demo, behind the line of plain decoding."
    fig, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
    ax.axline((0, 1), slope=1, color=COLORS["target"], label="plain decoding")
    taus = {p["name"]: p["tau"] for p in result["prompts"]}
    for sample, style in zip(result["samples"], ("-", "--", ":")):
        passes = [0]
        for drafted in sample["drafted"][:-1]: passes.append(passes[-1] + (not drafted))
        name = sample["name"]
        ax.step(passes, range(1, len(passes) + 1), style, where="post", color=COLORS["ours"], label=f"{name} (tau {taus[name]:.2f})")
    ax.set(xlabel="passes of the target", ylabel="tokens of the answer", xlim=0, ylim=0)
    ax.set_title(caption(result), fontsize=8)
    ax.legend(loc="lower right", fontsize=8)
    return fig


if __name__ == "__main__":
    use_style()
    result = json.loads((ROOT / "benchmarks/results/demo.json").read_text())
    draw(result).savefig(ROOT / "docs/demo.svg", metadata={"Date": None, "Creator": None})
