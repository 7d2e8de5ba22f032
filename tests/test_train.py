"""Training: killed at any moment and continued, spread over processes, over every family of target and every head."""
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlx_spark  # noqa: F401  (loads the BLAS before mlx)
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_spark.data import Dialogue, Shards, hidden_states, shard_stamp, to_line, write_shards
from mlx_spark.dspark import load_drafter
from mlx_spark.loss import LossConfig
from mlx_spark.targets import TINY_FAMILIES, save_tiny, tiny_target
from mlx_spark.train import Batches, TrainConfig, Trainer, evaluate, latest_checkpoint, new_drafter, read_log, train

ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
SHAPE = "--layers 1 --batch 4 --anchors 4 --markov-rank 8 --gamma 4 --draft-vocab 150 --iters 12".split()
OFTEN = "--save-every 2 --log-every 1 --eval-every 5 --held-out 0.2 --json".split()
NUMBERS = ("step", "lr", "loss", "ce", "l1", "conf", "grad_norm", "tau", "accept")

# Runs the command line and kills itself, as the kernel would, at the n-th call that touches the disk.
KILLER = """
import os, shutil, signal, sys
from pathlib import Path
import mlx_spark, mlx.core as mx
left = int(sys.argv[1])
def deadly(f):
    def wrapped(*args, **kwargs):
        global left
        if left == 0: os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return f(*args, **kwargs)
    return wrapped
if left >= 0:
    for where, name in ((os, "fsync"), (mx, "save_safetensors"), (Path, "rename"), (Path, "write_text"), (shutil, "rmtree")):
        setattr(where, name, deadly(getattr(where, name)))
from mlx_spark.cli import main
sys.exit(main(["train", *sys.argv[2:]]))
"""


def dialogues(n, seed=0, low=30, high=64):
    rng = np.random.default_rng(seed)
    rows = [(rng.integers(2, 200, m).astype(np.int32), (np.arange(m) > 5).astype(np.uint8)) for m in rng.integers(low, high, n)]
    return [Dialogue(i, "chat", "", *row) for i, row in enumerate(rows)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    "A tiny target's folder and a data file."
    folder = tmp_path_factory.mktemp("train")
    save_tiny(folder / "model", "llama")
    (folder / "d.jsonl").write_text("".join(to_line(d) + "\n" for d in dialogues(40)))
    return folder


def command(place, out, *flags, die_at=-1):
    data = ["--model", str(place / "model"), "--data", str(place / "d.jsonl"), "--out", str(out), "--resume"]
    return [sys.executable, "-c", KILLER, str(die_at), *data, *SHAPE, *OFTEN, *flags]


def finish(place, out, *flags, **how):
    done = subprocess.run(command(place, out, *flags, **how), env=ONE_THREAD, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def numbers(out): return [{k: r[k] for k in NUMBERS if k in r} for r in read_log(out / "log.jsonl")]
def weights(out): return mx.load(str(out / "drafter" / "model.safetensors"))


@pytest.fixture(scope="module")
def whole(place):
    "A run that nobody disturbs."
    code, out, _ = finish(place, place / "whole")
    assert code == 0 and json.loads(out.splitlines()[-1])["step"] == 12
    return place / "whole"


def same_run(one, other):
    assert numbers(one) == numbers(other)
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys() and all(mx.array_equal(a[k], b[k]).item() for k in a)


@pytest.mark.slow
def test_killed_at_every_kind_of_moment(place, whole, tmp_path):
    "Each process dies a little later than the one before: in the log, in a checkpoint's files, before and after the rename."
    steps, moments = [], (0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 13, 16, 24)
    for moment in moments:
        code, _, err = finish(place, tmp_path / "run", "--skip-preflight", die_at=moment)
        assert code == -signal.SIGKILL, err
        found = latest_checkpoint(tmp_path / "run")
        steps.append(int(found.name.removeprefix("step-")) if found else 0)
    assert steps == sorted(steps) and 0 == steps[0] < steps[-1] < 12
    assert len(set(steps)) < len(steps)                      # some died inside a checkpoint, and were sent back
    assert finish(place, tmp_path / "run")[0] == 0
    same_run(tmp_path / "run", whole)
    assert [p.name for p in (tmp_path / "run").glob("*step*")] == ["step-000012"]
    assert not list((tmp_path / "run").glob(".tmp*"))


@pytest.mark.slow
def test_killed_from_outside(place, whole, tmp_path):
    rng, killed = random.Random(0), 0
    for _ in range(6):
        process = subprocess.Popen(command(place, tmp_path / "run", "--skip-preflight"), env=ONE_THREAD, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before, least = latest_checkpoint(tmp_path / "run"), time.monotonic() + 120
        while process.poll() is None and latest_checkpoint(tmp_path / "run") == before and time.monotonic() < least: time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.05))
        killed += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert killed >= 3
    assert finish(place, tmp_path / "run")[0] == 0
    same_run(tmp_path / "run", whole)


def test_other_data_or_settings_are_refused(place, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    code, _, err = finish(place, tmp_path / "run", "--lr", "0.5", "--skip-preflight")
    assert code == 2 and "another config" in err and "0.5" in err
    (tmp_path / "other.jsonl").write_text("".join(to_line(d) + "\n" for d in dialogues(40, seed=1)))
    code, _, err = finish(place, tmp_path / "run", "--data", str(tmp_path / "other.jsonl"), "--draft-vocab", "150", "--skip-preflight")
    assert code == 2 and "another" in err


PARALLEL = """
import dataclasses, sys
import mlx_spark, mlx.core as mx
from mlx.utils import tree_flatten
sys.path.insert(0, sys.argv[2])
from test_train import parallel_trainer
trainer, batches = parallel_trainer(int(sys.argv[3]))
grads, terms = trainer.gradient(trainer.params, trainer.micro_batches(batches, 2))
rank, reports = trainer.group.rank(), [trainer.read(trainer.launch(batches), batches) for _ in range(3)]
arrays = dict(tree_flatten(grads)) | {"terms": terms, "losses": mx.array([r["loss"] for r in reports]), "size": mx.array(trainer.group.size())}
mx.save_safetensors(f"{sys.argv[1]}/rank{rank}.safetensors", arrays)
"""


def parallel_trainer(accumulate):
    model, _ = tiny_target("llama")
    config = TrainConfig(iters=10, batch=8, anchors=4, accumulate=accumulate, seq_len=64)
    trainer = Trainer(model, new_drafter(model, layers=1, gamma=4, rank=8, mask_token=270), config)
    return trainer, Batches(dialogues(40), config, 4)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_give_the_gradients_of_one(tmp_path, accumulate):
    (tmp_path / "run.py").write_text(PARALLEL)
    args = [str(tmp_path / "run.py"), str(tmp_path), str(Path(__file__).parent), str(accumulate)]
    launch = [Path(sys.executable).with_name("mlx.launch"), "-n", "2", "--backend", "ring", "--python", sys.executable, *args]
    done = subprocess.run(launch, env=ONE_THREAD, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ranks = [mx.load(str(tmp_path / f"rank{i}.safetensors")) for i in (0, 1)]
    assert all(r["size"].item() == 2 for r in ranks)
    trainer, batches = parallel_trainer(accumulate)
    grads, terms = trainer.gradient(trainer.params, trainer.micro_batches(batches, 2))
    alone = dict(tree_flatten(grads)) | {"terms": terms}
    alone["losses"] = mx.array([trainer.read(trainer.launch(batches), batches)["loss"] for _ in range(3)])
    for name, want in alone.items():
        scale = mx.abs(want).max().item()
        for r in ranks: assert mx.abs(r[name] - want).max().item() < 2e-5 * max(scale, 1e-2), name


@pytest.mark.parametrize("family, bits", [*((f, None) for f in TINY_FAMILIES), ("llama", 4)])
def test_every_target_can_be_trained_for(family, bits, tmp_path):
    model, _ = tiny_target(family, bits=bits)
    tokens = mx.array([[5, 6, 7, 8]])
    before = model(tokens)
    drafter = new_drafter(model, layers=1, gamma=4, rank=8, mask_token=270)
    config = TrainConfig(iters=3, batch=4, anchors=3, seq_len=64, held_out=0.2)
    last = train(model, drafter, dialogues(20), tmp_path, config, eval_every=3, progress=False)
    assert last["step"] == 3 and 1 <= last["tau"] < 2 and len(last["accept"]) == 4
    assert mx.array_equal(model(tokens), before).item()      # the target is what it was, and nobody listens to it
    load_drafter(tmp_path / "drafter", model)


@pytest.mark.parametrize("how", [dict(seq_head=h, confidence=c) for h in ("vanilla", "gated", "rnn", "none") for c in (True, False)]
                         + [dict(width=32), dict(d2t=mx.arange(10, 110)), dict(tap_layers=(-1, 3))], ids=str)
def test_every_drafter_learns(how):
    "A few steps on four rows: the loss falls for every shape of drafter."
    model, _ = tiny_target("qwen3")
    trainer = Trainer(model, new_drafter(model, **{"layers": 1, "gamma": 4, "rank": 8, "mask_token": 270} | how),
                      TrainConfig(iters=40, batch=4, anchors=6, seq_len=64, lr=5e-3, loss=LossConfig(ce=0.5)))
    batches = Batches(dialogues(4, low=40, high=41), trainer.config, 4)
    losses = [trainer.read(trainer.launch(batches), batches)["loss"] for _ in range(15)]
    assert np.mean(losses[-3:]) < 0.93 * losses[0]
    assert {*dict(tree_flatten(trainer.params))} == {*dict(tree_flatten(trainer.drafter.trainable_parameters()))}


def test_shards_train_as_online_taps_do(tmp_path):
    model, _ = tiny_target("gemma3")
    rows, config = dialogues(12), TrainConfig(iters=5, batch=4, anchors=4, seq_len=48, held_out=0)
    drafter = lambda: new_drafter(model, layers=1, gamma=4, rank=8, mask_token=270)
    write_shards(model, rows, (1, 2), tmp_path / "s", dtype=mx.float32, rows=5, progress=False)
    shards = Shards(tmp_path / "s", shard_stamp(model, drafter().config.target_layer_ids))
    for name, how in (("online", {}), ("stored", {"shards": shards})):
        train(model, drafter(), rows, tmp_path / name, config, log_every=1, progress=False, **how)
    online, stored = (read_log(tmp_path / name / "log.jsonl") for name in ("online", "stored"))
    assert [r["step"] for r in online] == [r["step"] for r in stored] == [1, 2, 3, 4, 5]
    for a, b in zip(online, stored): assert abs(a["loss"] - b["loss"]) < 1e-3
    with pytest.raises(ValueError, match="tap_layers"): Shards(tmp_path / "s", shard_stamp(model, (0, 2)))
    with pytest.raises(KeyError, match="lacks"):
        train(model, drafter(), dialogues(12, seed=3), tmp_path / "x", config, progress=False, shards=shards)


@pytest.mark.slow
def test_compiled_step_gives_the_same_numbers():
    model, _ = tiny_target("llama")
    config, results = TrainConfig(iters=6, batch=4, anchors=2, seq_len=64, accumulate=2), []
    for compile in (False, True):
        trainer = Trainer(model, new_drafter(model, layers=1, gamma=3, rank=4, mask_token=270), dataclasses.replace(config, compile=compile))
        batches = Batches(dialogues(8), config, 3)
        results.append([trainer.read(trainer.launch(batches), batches)["loss"] for _ in range(3)])
    assert np.allclose(*results, rtol=1e-5)


def test_evaluation_counts_a_reduced_vocabulary_honestly():
    "A drafter that cannot say the target's tokens accepts none, whatever it thinks."
    model, _ = tiny_target("llama")
    rows = dialogues(8)
    config = TrainConfig(batch=4, anchors=6, seq_len=64)
    tokens = mx.array(np.stack([np.pad(d.ids, (0, 64 - len(d.ids))) for d in rows]))
    said = set(np.array(mx.argmax(model(tokens), axis=-1)).ravel().tolist())
    never = mx.array([i for i in range(288) if i not in said][:20])
    trainer = Trainer(model, new_drafter(model, layers=1, gamma=4, rank=8, mask_token=270, d2t=never), config)
    found = evaluate(trainer, Batches(rows, config, 4))
    assert found["tau"] == 1 and found["accept"][0] == 0
    assert hidden_states(model, tokens, (1, 2))[0].shape == (8, 64, 128)
