"""What each part of a drafter is worth, on a small language that has in it what the parts are for.

The language: a key of four letters, then two words and the key, again and again: `word word KEY word word KEY ...`. Words
are drawn from a Markov chain over a lexicon in which many words begin alike (several futures are possible: what a serial
head is for); the key has to be copied from the text (what the context is for). A tiny target learns it, then writes, at temperature 1,
the dialogues that all drafters train on, for the same number of steps; acceptance is measured on dialogues held out.

  python benchmarks/ablations.py            # about 25 minutes on one CPU core
Each training is kept in --work, so a run that was stopped goes on where it was.
"""
import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import mlx_spark  # noqa: F401
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten

from mlx_spark.core import save_result, write_atomic
from mlx_spark.data import Job, Segment, generate_dialogues, read_dialogues, to_line
from mlx_spark.dspark import DSparkDrafter
from mlx_spark.targets import tiny_target
from mlx_spark.train import Batches, TrainConfig, Trainer, evaluate, new_drafter

USER, ASSISTANT, SPACE, MASK, LETTERS, V, LENGTH = 0, 1, 2, 31, 12, 32, 64
GAMMA = 7


class Language:
    "Words, which word follows which, and texts."
    def __init__(self, seed: int = 0, n_words: int = 24, n_starts: int = 4, n_next: int = 4):
        rng = np.random.default_rng(seed)
        starts = rng.permutation(LETTERS)[:n_starts]                  # few first letters: words begin alike
        self.words = np.stack([[starts[i % n_starts], *rng.integers(0, LETTERS, 3)] for i in range(n_words)]) + 3
        self.next = np.stack([rng.permutation(n_words)[:n_next] for _ in range(n_words)])
        self.weights = np.array([.4, .3, .2, .1])[:n_next]

    def key(self, rng): return rng.integers(0, LETTERS, 4) + 3

    def text(self, rng) -> np.ndarray: # (LENGTH,)
        key, word, out = self.key(rng), rng.integers(len(self.words)), []
        while len(out) < LENGTH:
            for _ in range(2):
                out += [*self.words[word], SPACE]
                word = rng.choice(self.next[word], p=self.weights / self.weights.sum())
            out += [*key, SPACE]
        return np.array([USER, *key, ASSISTANT, *out][:LENGTH])


def blank_target():
    "A tiny Llama with an ordinary random start."
    model, _ = tiny_target("llama", vocab_size=V)
    rng = np.random.default_rng(0)
    fresh = [(k, mx.array((rng.standard_normal(p.shape) * p.shape[-1] ** -0.5).astype(np.float32)) if p.ndim == 2 else mx.ones_like(p))
             for k, p in tree_flatten(model.parameters())]
    return model.load_weights(fresh) or model


def train_target(work: Path, language: Language, steps: int, batch: int = 32):
    "The target, trained on the language; kept in `work`."
    model, path = blank_target(), work / "target.safetensors"
    if path.exists():
        model.load_weights(str(path))
        return model
    rng, optimizer = np.random.default_rng(1), optim.AdamW(optim.cosine_decay(4e-3, steps), weight_decay=0.0)
    loss_and_grad = nn.value_and_grad(model, lambda x: nn.losses.cross_entropy(model(x[:, :-1])[:, 5:], x[:, 6:], reduction="mean"))
    for step in range(steps):
        loss, grads = loss_and_grad(mx.array(np.stack([language.text(rng) for _ in range(batch)])))
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state)
        if step % 100 == 0 or step == steps - 1: print(f"target, step {step}: loss {loss.item():.3f}", flush=True)
    mx.save_safetensors(str(path), dict(tree_flatten(model.parameters())))
    return model


def write_dialogues(work: Path, model, language: Language, n: int) -> list:
    "The target's own texts, sampled at temperature 1; kept in `work`."
    path, rng = work / f"dialogues-{n}.jsonl", np.random.default_rng(2)
    if path.exists(): return read_dialogues(path)
    given = [[USER, *language.key(rng).tolist(), ASSISTANT] for _ in range(n)]
    jobs = [Job(i, [Segment(ids=g), Segment(limit=LENGTH, temp=1.0, answer=True)]) for i, g in enumerate(given)]
    rows = sorted(generate_dialogues(model, jobs, frozenset(), batch=64, capacity=LENGTH), key=lambda d: d.index)
    write_atomic(path, "".join(to_line(d) + "\n" for d in rows))
    return rows


class Fused(DSparkDrafter):
    "No context injection: a block sees one fused vector, that of the newest position the target has run on."
    def _run(self, first, contexts, anchors, visible, keep=None):
        newest = mx.arange(visible.shape[-1]) == anchors[..., None] - 1          # (B, A, S)
        return super()._run(first, contexts, anchors, visible & newest[:, None, :, None], keep)


def measured(work: Path, name: str, model, rows: list, held_out: list, config: TrainConfig, *, fused: bool = False, **shape) -> dict:
    "Train one drafter on `rows` and measure it on `held_out`; kept in `work`."
    path = work / f"{name}.json"
    if path.exists(): return json.loads(path.read_text())
    drafter = new_drafter(model, layers=2, gamma=GAMMA, mask_token=MASK, **{"rank": 16, "confidence": False} | shape)
    if fused: drafter = Fused(drafter.config).bind(model)
    trainer, batches, began, losses = Trainer(model, drafter, config), Batches(rows, config, GAMMA), time.perf_counter(), []
    while trainer.step < config.iters: losses.append(trainer.read(trainer.launch(batches), batches)["loss"])
    found = evaluate(trainer, Batches(held_out, config, GAMMA), 8)
    found |= {"name": name, "tokens": sum(int(d.mask.sum()) for d in rows), "dialogues": len(rows), "losses": losses[::10],
              "train_tau_sampled": evaluate(trainer, batches, 8)["tau_sampled"]}
    print(f"{name}: tau {found['tau_sampled']:.2f} at temperature 1, accept {np.round(found['accept_sampled'], 2)}, "
          f"{time.perf_counter() - began:.0f} s", flush=True)
    write_atomic(path, json.dumps(found))
    return found


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--work", type=Path, default=Path("/tmp/mlx_spark_ablations"))
    p.add_argument("--out", default=str(Path(__file__).parent / "results" / "ablations.json"))
    p.add_argument("--target-steps", type=int, default=1200)
    p.add_argument("--steps", type=int, default=1000, help="of every drafter")
    p.add_argument("--dialogues", type=int, default=1200)
    a = p.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    language = Language()
    model = train_target(a.work, language, a.target_steps)
    rows = write_dialogues(a.work, model, language, a.dialogues)
    held_out, rows = rows[:160], rows[160:]
    lexicon, slots = set(map(tuple, language.words)), [d.ids[6:51].reshape(-1, 5)[:, :4] for d in held_out]   # (9, 4) each
    legal = np.mean([tuple(w) in lexicon for s in slots for w in np.delete(s, [2, 5, 8], axis=0)])
    copied = np.mean([(s[[2, 5, 8]] == d.ids[1:5]).all() for s, d in zip(slots, held_out)])
    print(f"the target's words are words: {legal:.1%}, all its keys are the key: {copied:.1%}", flush=True)
    config = TrainConfig(iters=a.steps, batch=16, anchors=8, seq_len=LENGTH, lr=3e-3)
    run = lambda name, rows=rows, **shape: measured(a.work, name, model, rows, held_out, config, **shape)
    parts_ = [run("one fused vector", fused=True), *(run(h, seq_head=h) for h in ("none", "vanilla", "gated", "rnn"))]
    starved = [run(f"width {w}, {n} dialogues", rows[:n], width=w) | {"width": w} for w in (16, 64) for n in (16, 64, 256, len(rows))]
    found = {"gamma": GAMMA, "words_legal": legal, "keys_copied": copied, "steps": a.steps, "target_steps": a.target_steps, "lexicon": len(language.words)}
    save_result(a.out, found, seeds=[0, 1, 2, config.seed], samples={"parts": parts_, "tokens": starved})


if __name__ == "__main__": main()
