"""Trains the drafters for SmolLM2-135M-Instruct: data from the target itself, DSpark and DFlash side by side, held-out acceptance.

One phase a process, so that several GPUs (CUDA_VISIBLE_DEVICES) and several processes a GPU can work at once:
  python benchmarks/train_smollm2.py data  --out D/a.jsonl --seed 1 --seconds 150
  python benchmarks/train_smollm2.py vocab --data 'D/*.jsonl' --out D/vocab.npy --size 16384
  python benchmarks/train_smollm2.py train --data 'D/*.jsonl' --vocab D/vocab.npy --out D/dspark --seconds 500 [--seq-head none ...]
"""
import argparse, glob, json, sys, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import mlx_spark
import mlx.core as mx
import numpy as np

from mlx_spark import load
from mlx_spark.data import loops, read_dialogues, regen, self_prompt_jobs
from mlx_spark.loss import LossConfig

MIX = {"chat": .3, "math": .35, "code": .35}

def read_all(pattern: str) -> list:
    "Dialogues of all files, those that loop left out; indices made unique."
    rows = [d for f in sorted(glob.glob(pattern)) for d in read_dialogues(f)]
    kept = [d for d in rows if not loops(d)]
    print(f"{len(rows)} dialogues, {len(rows) - len(kept)} loop, {sum(int(d.mask.sum()) for d in kept)} answer tokens kept", flush=True)
    return kept

def make_data(a):
    model, tokenizer = load(a.model)
    cold = self_prompt_jobs(a.jobs, tokenizer, max_resp=a.max_resp, temp=0.0, mix=MIX, turns_each=a.turns, seed=2 * a.seed)
    warm = self_prompt_jobs(a.jobs, tokenizer, max_resp=a.max_resp, temp=0.7, mix=MIX, turns_each=a.turns, seed=2 * a.seed + 1)
    jobs = [j for pair in zip(cold, warm) for j in pair]
    for i, j in enumerate(jobs): j.index = i
    m = regen(model, tokenizer, jobs, a.out, batch=a.batch, capacity=a.seq_len, seed=a.seed * 10**6, stop_after_s=a.seconds, about={"model": a.model, "mix": MIX, "temps": [0.0, 0.7]}, progress=False)
    print(json.dumps(m), flush=True)

def make_vocab(a):
    counts = np.zeros(49152, np.int64)
    for d in read_all(a.data): counts += np.bincount(d.ids[d.mask == 1], minlength=len(counts))
    order = np.argsort(-counts, kind="stable")
    np.save(a.out, order[:a.size].astype(np.int32))
    print({n: round(float(counts[order[:n]].sum() / counts.sum()), 4) for n in (4096, 8192, 12288, 16384, 24576)}, flush=True)

def make_speed(a):
    "Step time on random rows, and that the whole loop runs: nothing is learned here."
    from mlx_spark.data import Dialogue
    from mlx_spark.train import TrainConfig, Trainer, Batches, evaluate, new_drafter
    model, tokenizer = load(a.model)
    rng = np.random.default_rng(0)
    rows = [Dialogue(i, "chat", "", rng.integers(20, 49000, a.seq_len).astype(np.int32), (np.arange(a.seq_len) > 60).astype(np.uint8)) for i in range(200)]
    drafter = new_drafter(model, layers=a.layers, rank=a.rank, seq_head=a.seq_head, mask_token=a.mask_token, tap_layers=(1, 8, 15, 22, 28), d2t=mx.arange(a.size))
    config = TrainConfig(iters=1000, batch=a.batch, seq_len=a.seq_len, anchors=a.anchors, lr=a.lr, bf16=a.bf16)
    trainer, batches = Trainer(model, drafter, config), Batches(rows, config, 7)
    for i in range(40):
        began = time.perf_counter(); report = trainer.read(trainer.launch(batches), batches)
        if i in (0, 1, 2, 10, 20, 39): print(i, round(time.perf_counter() - began, 4), round(report["loss"], 3), flush=True)
    began, waiting = time.perf_counter(), None
    for i in range(20):
        launched = trainer.launch(batches)
        if waiting: trainer.read(waiting, batches)
        waiting = launched
    trainer.read(waiting, batches)
    print("pipelined", round((time.perf_counter() - began) / 20, 4), evaluate(trainer, batches, 1)["tau"], mx.get_peak_memory() / 1e9, flush=True)

def make_drafter(a):
    from mlx_spark.train import TrainConfig, new_drafter, train
    model, tokenizer = load(a.model)
    more = {} if not a.vocab else {"d2t": mx.array(np.load(a.vocab))}
    drafter = new_drafter(model, layers=a.layers, gamma=7, rank=a.rank, seq_head=a.seq_head, mask_token=a.mask_token, tap_layers=(1, 8, 15, 22, 28), confidence=a.seq_head != "none", **more)
    config = TrainConfig(iters=a.iters, batch=a.batch, seq_len=a.seq_len, anchors=a.anchors, lr=a.lr, bf16=a.bf16, loss=LossConfig(ce=a.ce, l1=a.l1), held_out=0.01)
    print(json.dumps(train(model, drafter, read_all(a.data), a.out, config, stop_after_s=a.seconds, log_every=50, eval_every=400, save_every=a.save_every, progress=False, resume=True)), flush=True)

if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("phase", choices=["data", "vocab", "speed", "train"])
    p.add_argument("--model", default="smollm2-135m"); p.add_argument("--data"); p.add_argument("--out", required=True); p.add_argument("--seconds", type=float)
    p.add_argument("--seed", type=int, default=1); p.add_argument("--jobs", type=int, default=40000); p.add_argument("--batch", type=int, default=32); p.add_argument("--max-resp", type=int, default=200)
    p.add_argument("--size", type=int, default=16384); p.add_argument("--vocab"); p.add_argument("--layers", type=int, default=4); p.add_argument("--rank", type=int, default=64)
    p.add_argument("--seq-head", default="vanilla"); p.add_argument("--mask-token", type=int, default=16); p.add_argument("--iters", type=int, default=4000); p.add_argument("--anchors", type=int, default=64)
    p.add_argument("--lr", type=float, default=2e-3); p.add_argument("--bf16", action="store_true"); p.add_argument("--ce", type=float, default=0.1); p.add_argument("--l1", type=float, default=0.9)
    p.add_argument("--seq-len", type=int, default=320); p.add_argument("--turns", type=int, default=1); p.add_argument("--save-every", type=int, default=500)
    a = p.parse_args()
    {"data": make_data, "vocab": make_vocab, "speed": make_speed, "train": make_drafter}[a.phase](a)
