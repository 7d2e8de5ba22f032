"""Generating training data: killed and continued, over the families and quantized targets, compiled or not."""
import json
import os
import signal
import subprocess
import sys
import time

import mlx_spark  # noqa: F401  (loads the BLAS before mlx)
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from mlx_spark.data import (
    Job, Segment, Shards, clean, generate_dialogues, make_ring_step, read_dialogues, ring_shapes, shard_stamp, write_shards)
from mlx_spark.targets import save_tiny, tiny_target

END = frozenset([256])
COMMAND = [sys.executable, "-c", "import sys; from mlx_spark.cli import main; sys.exit(main())"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return save_tiny(tmp_path_factory.mktemp("model"), "llama")


def plain(model, prompt, n):
    out = [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=n)]
    return out[:out.index(256) + 1] if 256 in out else out


@pytest.mark.parametrize("family, bits", [("llama", None), ("llama", 4), ("qwen3", None), ("gemma3", None), ("gemma4", None), ("qwen3_moe", 8)])
def test_lock_step_writes_what_plain_decoding_writes(family, bits):
    model, _ = tiny_target(family, bits=bits)
    jobs = [Job(i, [Segment(ids=[65 + i, 7, 11]), Segment(limit=8 + 5 * i, answer=True)]) for i in range(4)]
    for d in generate_dialogues(model, jobs, END, batch=3, capacity=40):
        assert d.ids[d.mask == 1].tolist() == plain(model, [65 + d.index, 7, 11], 8 + 5 * d.index)


def test_compiled_step():
    model, _ = tiny_target("llama")
    shapes = ring_shapes(model, 2, 8)
    results = []
    for compile in (False, True):
        step, tokens, out = make_ring_step(model, compile=compile), mx.array([5, 40]), []
        keys, values = ([mx.zeros(s[i]) for s in shapes] for i in (0, 1))
        for t in range(6):
            noise = mx.array(np.array([[1, t], [2, t]], np.uint32))
            tokens, keys, values = step(tokens, mx.array(t), mx.array([0, 2]), mx.array([0.0, 0.9]), keys, values, noise)
            out.append(tokens.tolist())
        results.append(out)
    assert results[0] == results[1]


class Level(nn.Module):
    "A target that finds every token equally likely."
    def __init__(self, model):
        super().__init__()
        self.inner = model

    @property
    def layers(self): return self.inner.layers
    def __call__(self, x, cache=None): return 0 * self.inner(x, cache=cache)


def test_every_position_of_every_dialogue_has_its_own_draw():
    model = Level(tiny_target("llama")[0])
    jobs = [Job(i, [Segment(ids=[65]), Segment(limit=40, temp=1.0, answer=True)]) for i in range(6)]
    texts = [d.ids[1:] for d in generate_dialogues(model, jobs, frozenset(), batch=3, capacity=64)]
    assert all(len(set(t.tolist())) > 25 for t in texts)
    assert len({t.tobytes() for t in texts}) == 6


def regen(folder, out, *flags, wait=True):
    command = [*COMMAND, "regen", "--model", str(folder), "--out", str(out), "--batch", "4", "--capacity", "64", "--json", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if not wait: return process
    stdout, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return json.loads(stdout.splitlines()[-1])


def lines(path): return path.read_text().splitlines() if path.exists() else []


@pytest.mark.slow
def test_killed_and_continued(folder, tmp_path):
    flags = ("--self-prompts", "60", "--max-resp", "24", "--temp", "0.7", "--seed", "3")
    whole = regen(folder, tmp_path / "whole.jsonl", *flags)
    out, killed = tmp_path / "killed.jsonl", 0
    for least in (3, 20, 40):
        process = regen(folder, out, *flags, wait=False)
        while len(lines(out)) < least and process.poll() is None: time.sleep(0.02)
        killed += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert len(read_dialogues(out)) >= min(least, 60) - 1       # only a line being written can be lost
    found = regen(folder, out, *flags)
    assert killed >= 2 and found["dialogues"] == 60
    assert sorted(lines(out)) == sorted(lines(tmp_path / "whole.jsonl"))
    assert found["sampled_tokens"] < whole["sampled_tokens"]
    same = ("dialogues", "tokens", "answer_tokens", "domains", "chat_template", "seed", "temp")
    assert {k: found[k] for k in same} == {k: whole[k] for k in same}


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_shards_of_every_kind_of_target(family, tmp_path):
    model, _ = tiny_target(family)
    rng = np.random.default_rng(0)
    rows = [d for i, n in enumerate((5, 30, 17)) for d in [type("D", (), {"ids": rng.integers(0, 250, n).astype(np.int32)})()]]
    write_shards(model, rows, (-1, 3), tmp_path, rows=2, batch=2, progress=False)
    shards = Shards(tmp_path, shard_stamp(model, (-1, 3)))
    assert len(shards.where) == 3
    stored = [shards.states([key], 30)[0] for key in shards.where]
    assert {s.shape for s in stored} == {(1, 30, 128)} and all(s.dtype == mx.bfloat16 for s in stored)


def test_clean_keeps_order_and_drops_what_it_says(folder, tmp_path):
    flags = ("--self-prompts", "6", "--max-resp", "6", "--user-temp", "0")   # greedy user turns: openings repeat themselves
    found = regen(folder, tmp_path / "d.jsonl", *flags)
    rows = read_dialogues(tmp_path / "d.jsonl")
    kept, report = clean(rows + rows)
    assert [d.index for d in kept] == [d.index for d in clean(rows)[0]]
    assert sum(r["repeated"] for r in report.values()) >= len(kept)
    assert found["kept_answer_tokens"] == sum(int(d.mask.sum()) for d in kept)
