"Calibration against the reference data, as properties, and through the command."
import json
import os
import shutil
from argparse import ArgumentParser
from pathlib import Path

import mlx_spark  # noqa: F401  (loads a BLAS before MLX)
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.utils import load_model

from mlx_spark import calibration
from mlx_spark.calibration import (
    GRID, Watched, auc, check_golden, collect, fit_temps, measure_positions, pick_temp, reliability, sigmoid, stamp, survival)
from mlx_spark.dspark import load_drafter, save_drafter
from mlx_spark.sources import PromptLookup
from mlx_spark.verify import Sampling

ROOT = Path(__file__).parents[1]
SUITE = Path(os.environ.get("MLX_SPARK_GOLDENS", ROOT / "goldens/deepspec"))
SHIPPED = ROOT / "goldens/deepspec"
DRAFTER = "q3_b7_vanilla_cm"


# ---- reference data ----

@pytest.mark.parametrize("case", check_golden(SUITE / "calibration"), ids=lambda c: c.name)
def test_golden(case): assert case.status == "pass" and case.checked, case.note


@pytest.mark.parametrize("file,change", [
    ("bin_edges.json", lambda d: d["per_position"][0].__setitem__("ece", .5)),
    ("overconfident.json", lambda d: d["per_position"][2]["reliability"][0].__setitem__("weight", 1e6)),
    ("empty_positions.json", lambda d: d["per_position"][4].__setitem__("auc", .5)),
    ("sts_overconfident.json", lambda d: d["fits"]["log81"]["ece_curves"][3].__setitem__(40, 0.0)),
    ("overconfident.json", lambda d: d["summary"].__setitem__("auc_mean", .9))])
def test_golden_notices(tmp_path, file, change):
    for path in (SHIPPED / "calibration").glob(f"{file.removeprefix('sts_').removesuffix('.json')}.safetensors"): shutil.copy(path, tmp_path)
    data = json.loads((SHIPPED / "calibration" / file).read_text())
    change(data)
    (tmp_path / file).write_text(json.dumps(data))
    assert [c.status for c in check_golden(tmp_path)] == ["fail"]


# ---- properties ----

samples = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60)


@given(samples)
@settings(max_examples=150, deadline=None)
def test_metrics(pairs):
    p, y = (np.array(x) for x in zip(*pairs))
    bins, area = reliability(p, y), auc(p, y)
    assert bins.count.sum() == len(p) and 0 <= bins.ece <= 1
    assert bins.ece >= abs(np.clip(p, 1e-8, 1 - 1e-8).mean() - y.mean()) - 1e-9   # bins can't hide a bias
    if y.all() or not y.any(): assert np.isnan(area)
    else: assert area == pytest.approx(1 - auc(p, ~y))


@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_fit_never_worsens_what_it_fits(seed, gamma):
    rng = np.random.default_rng(seed)
    logits = rng.normal(1, 2, (80, gamma))
    accept = np.cumprod(rng.random((80, gamma)) < sigmoid(logits / rng.uniform(.3, 3, gamma)), axis=1)
    lengths = rng.integers(1, gamma + 1, 80)
    grid = np.append(GRID, 1.0)
    fit = fit_temps(logits, accept, lengths, grid=grid)
    found = [p.ece for p in measure_positions(survival(logits, fit.temps), accept, lengths)]
    np.testing.assert_allclose(found, fit.ece_after, atol=1e-12)
    assert fit.ece_after[0] <= fit.ece_before[0] + 1e-12    # T = 1 is in this grid
    for k in range(gamma):                                  # one temperature a position changes no order
        assert (np.argsort(logits[:, k]) == np.argsort(logits[:, k] / fit.temps[k])).all()


# ---- blocks ----

@pytest.fixture(scope="module")
def pair():
    target = load_model(SHIPPED / "targets/qwen3_tiny")[0]
    return target, load_drafter(SHIPPED / "drafters" / DRAFTER, target)


@pytest.fixture(scope="module")
def rows(): return [json.loads(line) for line in (SHIPPED / f"traces/{DRAFTER}__thr0.jsonl").read_text().splitlines()]


def test_blocks_of_the_reference(pair, rows):
    "All rounds of all prompts; the reference runs one more where the token limit was met already."
    for row in rows:
        n = row["max_new_tokens"]
        blocks, done = collect(*pair, [row["prompt_ids"]], max_tokens=n), 1
        for i, length in enumerate(blocks.lengths):
            r = row["rounds"][i]
            assert length == min(7, n - done - 1)
            np.testing.assert_allclose(blocks.logits[i, :length], r["confidence_logits"][:length], atol=1e-3)
            assert blocks.accept[i].sum() == min(r["accepted_draft_tokens"], length)
            done += 1 + blocks.accept[i].sum()


def test_a_stop_hides_the_rest_of_its_block(pair, rows):
    row = rows[0]
    r = next(r for r in row["rounds"] if r["accepted_draft_tokens"] >= 3)
    blocks = collect(*pair, [row["prompt_ids"]], max_tokens=64, stop=frozenset([r["draft_tokens"][1]]))
    assert blocks.lengths[-1] == blocks.accept[-1].sum() < 7


def test_temperatures_in_use_are_taken_out(pair, rows):
    target, drafter = pair
    plain = collect(target, drafter, [rows[0]["prompt_ids"]], max_tokens=16)
    try:
        drafter.config.calibration = {"temps": [.5, 2, 3, 1, 1, 1, 1]}
        again = collect(target, drafter, [rows[0]["prompt_ids"]], max_tokens=16)
    finally: drafter.config.calibration = None
    np.testing.assert_allclose(again.logits, plain.logits, atol=1e-3)


def test_ties():
    assert pick_temp(np.array([.3, .1, .1, .1]), np.array([1, 4, .5, 2])) == 2
    assert pick_temp(np.zeros(3), np.array([.1, 1.1, 10])) == 1


def test_sampling_and_seeds(pair, rows):
    prompts = [r["prompt_ids"] for r in rows[:2]]
    a, b, c = (collect(*pair, prompts, sampling=Sampling(temp=1.0), max_tokens=24, seed=s) for s in (0, 0, 1))
    assert np.array_equal(a.logits, b.logits) and np.array_equal(a.accept, b.accept)
    assert a.logits.shape != c.logits.shape or not np.array_equal(a.logits, c.logits)
    assert set(a.prompt) == {0, 1}


def test_watching_changes_no_token(pair, rows):
    from mlx_spark.generate import speculative_step
    target, drafter = pair
    for sampling in (Sampling(), Sampling(temp=1.0)):
        ids = [[s.token for s in speculative_step(mx.array(rows[0]["prompt_ids"]), target, source, sampler=sampling, seed=3, max_tokens=32)]
               for source in (drafter.as_source(target), Watched(drafter.as_source(target)))]
        assert ids[0] == ids[1]


def test_a_source_without_confidence(pair):
    with pytest.raises(ValueError, match="gives no confidences"):
        collect(pair[0], PromptLookup(ngram=1, min_ngram=1), [list(range(512)) * 2], max_tokens=4)


# ---- stamp and command ----

def test_stamp_is_whole_or_not_at_all(pair, tmp_path, monkeypatch):
    save_drafter(pair[1], tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    monkeypatch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError, match="killed"): stamp(tmp_path, {"temps": [1.5] * 7, "temp": 0.0})
    assert (tmp_path / "config.json").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_uncalibrated_is_as_before(pair, tmp_path):
    "Temperatures of 1 give the confidences of no temperatures, to the bit; weights are untouched."
    target, drafter = pair
    save_drafter(drafter, tmp_path)
    stamp(tmp_path, {"temps": [1.0] * 7, "temp": 0.0})
    again = load_drafter(tmp_path, target)
    a, b = (d.draft(mx.array([11]), d.make_cache(), 7, want_confidence=True) for d in (drafter, again))
    assert mx.array_equal(a.confidence, b.confidence) and mx.array_equal(a.tokens, b.tokens)


@pytest.fixture
def command(pair, tmp_path, monkeypatch):
    target, drafter = pair
    save_drafter(drafter, tmp_path / "d")
    class Tokenizer:
        eos_token_ids, has_chat_template = [1], False
        def encode(self, text): return [int(t) for t in text.split()]
    monkeypatch.setattr("mlx_spark.targets.load", lambda name: (target, Tokenizer()))
    def run(*argv):
        parser = ArgumentParser()
        calibration.add_arguments(parser)
        return calibration.run(parser.parse_args(["--draft-model", str(tmp_path / "d"), *argv]))
    return run


def test_command(command, rows, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(" ".join(map(str, r["prompt_ids"])) for r in rows[:4]))
    assert command("--prompts", str(prompts), "--max-tokens", "32", "--target", "0.8", "--json") == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    config = json.loads((tmp_path / "d/config.json").read_text())
    assert config["calibration"]["temps"] == report["temps"] and config["calibration"]["temp"] == 0
    assert len(report["thresholds"]) == 7 and "stamped" in err
    assert command("--prompts", str(prompts), "--max-tokens", "16", "--out", str(tmp_path / "copy")) == 0
    assert (tmp_path / "copy/model.safetensors").exists()
    for argv, said in ((["--n", "1"], "--n must be"), (["--max-tokens", "1"], "--max-tokens"),
                       (["--prompts", str(prompts), "--target", "2", "--max-tokens", "8"], "between 0 and 1")):
        with pytest.raises(ValueError, match=said): command(*argv)
