"The oracle on the goldens that ship, and on goldens that were tampered with; the record building of dump_deepspec."
import importlib.util
import json
import os
import shutil
import sys
import types
from argparse import ArgumentParser
from pathlib import Path

import mlx_spark  # noqa: F401  (loads a BLAS before MLX)
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mlx_spark import oracle
from mlx_spark.oracle import Case, Models, Tally, decode_reference, read_jsonl, run_suite

ROOT = Path(__file__).parents[1]
SUITE = Path(os.environ.get("MLX_SPARK_GOLDENS", ROOT / "goldens/deepspec"))  # point it at a larger suite to check that
DRAFTER = "q3_b4_rank0_conf"


@pytest.fixture(scope="module")
def models(): return Models(SUITE)


name_of = lambda path, form: f"{path.parent.name}/{path.stem}" + (f" in {form}" if form else "")
PLAN = [pytest.param(path, form, id=name_of(path, form)) for path, form in oracle.plan(SUITE)]


@pytest.mark.parametrize("path,form", PLAN)
def test_golden(models, path, form):
    for case in oracle.as_cases(path.parent.name, path.stem, lambda: oracle.check_file(models, path, form)):
        assert case.status != "fail", case.note
        assert case.status == "not yet" or case.checked > 0
        assert case.ties <= 5


def test_manifest(): assert oracle.check_layout(SUITE).note == ""


# ---- faults ----

@pytest.fixture
def suite(tmp_path):
    "A small copy: one target, one drafter, its forward file and two traces."
    for name in ("targets/qwen3_tiny", f"drafters/{DRAFTER}"): shutil.copytree(SUITE / name, tmp_path / name)
    for name in (f"forward/{DRAFTER}.safetensors", f"traces/{DRAFTER}__trunc.jsonl", f"traces/{DRAFTER}__stop.jsonl",
                 "sampling/verify.safetensors", "sampling/verify.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(SUITE / name, tmp_path / name)
    return tmp_path


def failures(folder, only=""):
    return {f"{c.group}/{c.name}": c.note for c in run_suite(folder, only=only) if c.status == "fail"}


def edit_json(path, change): path.write_text(json.dumps(change(json.loads(path.read_text()))))


def edit_tensors(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_untouched(suite): assert failures(suite) == {}


@pytest.mark.parametrize("tensor", [
    "fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.input_layernorm.weight", "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.k_norm.weight", "layers.1.self_attn.v_proj.weight", "layers.1.mlp.down_proj.weight",
    "confidence_head.proj.weight"])
def test_perturbed_weight(suite, tensor):
    "Two hundredths more in one entry of one tensor."
    def change(tensors): tensors[tensor][(0,) * tensors[tensor].ndim] += .02
    edit_tensors(suite / f"drafters/{DRAFTER}/model.safetensors", change)
    assert f"forward/{DRAFTER}" in failures(suite, "forward")


@pytest.mark.parametrize("shift", [-1, 1])
def test_tap_off_by_one(suite, shift):
    move = lambda config: config | {"target_layer_ids": [k + shift for k in config["target_layer_ids"]]}
    edit_json(suite / f"drafters/{DRAFTER}/config.json", move)
    found = failures(suite)
    assert set(found) == {f"traces/{DRAFTER}__trunc", f"traces/{DRAFTER}__stop"}   # random features know no layer
    assert all("round 0" in note for note in found.values())


def test_wrong_rope_and_wrong_mask_token(suite):
    path = suite / f"drafters/{DRAFTER}/config.json"
    rope = lambda theta: {"rope_parameters": {"rope_theta": theta, "rope_type": "default"}}
    edit_json(path, lambda c: c | rope(20000.0))
    assert f"forward/{DRAFTER}" in failures(suite, "forward")
    edit_json(path, lambda c: c | rope(10000.0) | {"mask_token_id": 5})
    assert "draft_input_ids" in failures(suite, "forward")[f"forward/{DRAFTER}"]


@pytest.mark.parametrize("field,change", [
    ("draft_tokens", lambda v: v[:1] + [v[1] ^ 1] + v[2:]), ("confidence_logits", lambda v: [v[0] + 5e-4] + v[1:]),
    ("ctx_len", lambda v: v + 1), ("accepted_draft_tokens", lambda v: v + 1), ("next_token", lambda v: v ^ 1),
    ("draft_cache_len_after", lambda v: v - 1)])
def test_changed_record(suite, field, change):
    "Every field of a round is looked at."
    path = suite / f"traces/{DRAFTER}__trunc.jsonl"
    rows = read_jsonl(path)
    rows[2]["rounds"][0][field] = change(rows[2]["rounds"][0][field])
    path.write_text("\n".join(map(json.dumps, rows)))
    assert failures(suite, "trunc")[f"traces/{DRAFTER}__trunc"].startswith(f"row 2 round 0 {field.removesuffix('_logits')}")


@pytest.mark.parametrize("field", ["output_ids", "acceptance_lengths", "proposal_lengths", "target_greedy_new_tokens"])
def test_changed_row(suite, field):
    path = suite / f"traces/{DRAFTER}__stop.jsonl"
    rows = read_jsonl(path)
    rows[4][field] = [*rows[4][field][:-1], rows[4][field][-1] + 1]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert f"row 4 {field}" in failures(suite, "stop")[f"traces/{DRAFTER}__stop"]


def test_lost_round(suite):
    path = suite / f"traces/{DRAFTER}__trunc.jsonl"
    rows = read_jsonl(path)
    rows[0]["rounds"] = []   # a loop without the redundant last round would write this
    path.write_text("\n".join(map(json.dumps, rows)))
    assert "number of rounds: 1, wanted 0" in failures(suite, "trunc")[f"traces/{DRAFTER}__trunc"]


def test_changed_decision(suite):
    edit_tensors(suite / "sampling/verify.safetensors", lambda t: t.update({"case0.accepted": t["case0.accepted"] + 1}))
    assert "case0.random_close accepted" in failures(suite, "verify")["sampling/verify"]


def test_unreadable(suite):
    forward, trace = suite / f"forward/{DRAFTER}.safetensors", suite / f"traces/{DRAFTER}__trunc.jsonl"
    forward.write_bytes(forward.read_bytes()[:-1000])
    trace.write_text(trace.read_text()[:-1000])
    (suite / "traces/stray__file.jsonl").write_text("{}\n")
    (suite / "more").mkdir()
    found = failures(suite)
    assert "cut off" in found[f"forward/{DRAFTER}"] and "is no JSON" in found[f"traces/{DRAFTER}__trunc"]
    assert "no trace says which target 'stray' belongs to" in found["traces/stray__file"]
    assert found["suite/layout and manifest"] == "unknown folders: ['more'], wanted []"


def test_unknown_target(suite):
    (suite / "drafters/orphan").mkdir()
    shutil.copy(suite / f"forward/{DRAFTER}.safetensors", suite / "forward/orphan.safetensors")
    assert "no trace says which target 'orphan' belongs to" in failures(suite, "orphan")["forward/orphan"]


def test_manifest_sees_changes(suite):
    manifest = {f"forward/{DRAFTER}.safetensors": {"sha256": "0"}, "traces/gone.jsonl": {"sha256": "0"}}
    (suite / "MANIFEST.json").write_text(json.dumps(manifest))
    faults = []
    original = Tally.fault
    try:
        Tally.fault = lambda self, what, why, at="": (faults.append(what), original(self, what, why, at))[0]
        oracle.check_layout(suite)
    finally: Tally.fault = original
    assert faults == [f"sha256 of forward/{DRAFTER}.safetensors", "traces/gone.jsonl"]


def test_no_suite(tmp_path):
    with pytest.raises(FileNotFoundError, match="no suite at"): run_suite(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ValueError, match=r"is no suite: wanted .* found \['notes.txt'\]"): run_suite(tmp_path)


# ---- ties ----

def test_tie_is_followed(models, monkeypatch):
    "A recorded choice within TIE is taken over, counted, and the rest of the row is compared."
    target, drafter = models.pair(DRAFTER)
    rows = read_jsonl(SUITE / f"traces/{DRAFTER}__trunc.jsonl")
    row = next(r for r in rows if r["rounds"][0]["accepted_draft_tokens"] < 3)
    recorded = row["rounds"][0]
    taken = recorded["draft_tokens"][3], recorded["target_argmax"][3]
    recorded["draft_tokens"][3] = next(t for t in range(10, 99) if t not in taken)
    for what in ("confidence_logits", "target_argmax", "min_target_margin"): recorded.pop(what)   # follow the changed token
    strict, loose = Tally("", ""), Tally("", "")
    oracle.check_row(strict, target, drafter, row, "row")
    assert strict.faults[0].startswith("row round 0 draft_tokens") and not strict.ties
    monkeypatch.setattr(oracle, "TIE", 1e3)
    oracle.check_row(loose, target, drafter, row, "row")
    assert not loose.faults and loose.ties > 0


def test_recorded_margin_rules_out_a_tie(models, monkeypatch):
    "Equal logits are no excuse where the reference saw a clear winner."
    target, drafter = models.pair(DRAFTER)
    row = read_jsonl(SUITE / f"traces/{DRAFTER}__trunc.jsonl")[3]
    wanted = [t ^ 1 for t in row["rounds"][0]["draft_tokens"]]
    row["rounds"][0] |= {"draft_tokens": wanted, "min_draft_margin": .5}
    monkeypatch.setattr(oracle, "_settle_ties", lambda *a: pytest.fail("asked for a tie"))
    assert decode_reference(target, drafter, row)[1][0]["draft_tokens"] != wanted


def test_tie_of_a_recorded_draw(models, monkeypatch):
    name = next(p for p in sorted(SUITE.glob("sampling/trace_q3*.jsonl")))
    target, drafter = models.pair(name.stem.removeprefix("trace_"))
    row = next(r for r in read_jsonl(name) if r["temperature"] == 1.0)
    u = row["first_token_uniform"]
    at = len(row["prompt_ids"])
    for shift in (.02, .05, .1, .2, .4):
        row["first_token_uniform"] = u + shift if u < .5 else u - shift
        if decode_reference(target, drafter, row)[0][at] != row["output_ids"][at]: break
    strict, loose = Tally("", ""), Tally("", "")
    oracle.check_row(strict, target, drafter, row, "row")
    assert strict.faults and not strict.ties
    monkeypatch.setattr(oracle, "TIE", shift)
    oracle.check_row(loose, target, drafter, row, "row")
    assert not loose.faults and loose.ties == 1


# ---- later modules, command ----

def test_later(tmp_path, monkeypatch):
    (tmp_path / "scheduler").mkdir()
    fake = types.ModuleType("mlx_spark.scheduler")
    fake.__spec__ = types.SimpleNamespace(name=fake.__name__, loader=None)
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    assert [c.status for c in run_suite(tmp_path, only="scheduler")] == ["not yet"]
    fake.check_golden = lambda folder: [Case("scheduler", "algorithm1", "fail", 1, note=str(folder.name))]
    assert [(c.status, c.note) for c in run_suite(tmp_path, only="scheduler")] == [("fail", "scheduler")]
    fake.check_golden = lambda folder: 1 / 0
    [case] = run_suite(tmp_path, only="scheduler")
    assert (case.status, case.note) == ("fail", "ZeroDivisionError: division by zero")


def command(*argv):
    parser = ArgumentParser()
    oracle.add_arguments(parser)
    return oracle.run(parser.parse_args([str(a) for a in argv]))


def test_command_suite(suite, capsys):
    assert command("--suite", suite) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("5 cases: 5 passed, 0 failed, 0 not yet; ")
    assert command("--suite", suite, "--json", "--only", "traces") == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert out.count("\n") == 1 and result["passed"] and len(result["cases"]) == 2 and "traces/" in err
    edit_json(suite / f"drafters/{DRAFTER}/config.json", lambda c: c | {"mask_token_id": 5})
    assert command("--suite", suite, "--json") == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["passed"] is False
    assert command("--suite", suite, "--only", "nothing like this") == 2
    assert command("--suite", suite, "--acceptance-only", "--json") == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {len(rows) for rows in report.values()} == {8, 10}


def test_command_fixture(suite, capsys):
    trace = suite / f"traces/{DRAFTER}__trunc.jsonl"
    pair = ("--target", suite / "targets/qwen3_tiny", "--draft-model", suite / f"drafters/{DRAFTER}")
    assert command("--fixture", trace, *pair) == 0
    assert command("--fixture", trace, *pair, "--acceptance-only") == 0
    assert "8 of 8 outputs identical" in capsys.readouterr().out
    assert command("--fixture", trace) == 2 and "needs --target and --draft-model" in capsys.readouterr().err
    for how in ((), ("--json",), ("--acceptance-only",)): assert command("--fixture", suite / "no.jsonl", *pair, *how) == 2
    cut = suite / "cut.jsonl"
    cut.write_text(trace.read_text()[:-9])
    for how in ((), ("--acceptance-only",)): assert command("--fixture", cut, *pair, *how) == 2
    rows = read_jsonl(trace)
    for row in rows: row["temperature"] = 1.0
    trace.write_text("\n".join(map(json.dumps, rows)))
    assert command("--fixture", trace, *pair) == 1 and "without recorded draws" in capsys.readouterr().out
    assert command("--fixture", trace, *pair, "--acceptance-only") == 0


# ---- dump_deepspec ----

@pytest.fixture(scope="module")
def dump():
    spec = importlib.util.spec_from_file_location("dump_deepspec", ROOT / "goldens/dump_deepspec.py")
    module = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try: spec.loader.exec_module(module)
    finally: sys.dont_write_bytecode = before
    return module


def passes_of(row):
    "What hooks on the reference would have seen of a recorded run."
    nothing = {"ctx_len": None, "draft_tokens": None, "draft_margin": None, "confidence_logits": None}
    passes = [{"input_ids": row["prompt_ids"], "argmax": [], "margin": []} | nothing]
    for r in row["rounds"]:
        verified = [r["anchor"], *r["draft_tokens"][:r["proposal_length"]]]
        seen = {"input_ids": verified, "argmax": r["target_argmax"], "margin": [r["min_target_margin"]]}
        drafted = {k: r[k] for k in ("ctx_len", "draft_tokens", "confidence_logits")}
        passes.append(seen | drafted | {"draft_margin": r["min_draft_margin"]})
    return passes


def rebuild(dump, row, gamma, passes=None):
    names = "case", "drafter", "target", "prompt_index", "max_new_tokens", "temperature", "confidence_threshold"
    return dump.build_row(passes or passes_of(row), row["prompt_ids"], row["output_ids"], row["target_greedy_new_tokens"],
                          gamma=gamma, stop_ids=row["stop_token_ids"], **{k: row[k] for k in names})


@pytest.mark.parametrize("path", sorted(SUITE.glob("traces/*__*.jsonl")), ids=lambda p: p.stem)
def test_dump_rebuilds_traces(dump, path):
    gamma = 7 if "_b7_" in path.stem else 4
    for row in read_jsonl(path):
        built, note = rebuild(dump, row, gamma), row.pop("note", None)
        margin, wanted = built.pop("min_threshold_margin"), row.pop("min_threshold_margin")
        assert built == row, note
        assert margin == wanted is None or margin == pytest.approx(wanted, abs=1e-6)


def test_dump_refuses_another_loop(dump):
    row = read_jsonl(SUITE / f"traces/{DRAFTER}__thr0.jsonl")[0]
    passes = passes_of(row)
    broken = lambda i, **change: rebuild(dump, row, 4, [p | change if j == i else p for j, p in enumerate(passes)])
    refused = lambda match: pytest.raises(ValueError, match=match)
    with refused("no target pass came before"): rebuild(dump, row, 4, passes[1:])
    with refused("round 1: the drafter got 1 context rows, the loop owes it"): broken(2, ctx_len=1)
    with refused("the block has 3"): rebuild(dump, row, 3)
    with refused("the drafter's logits say"): broken(1, draft_tokens=[1, 2, 3, 4])
    with refused("anchor 511"): broken(2, input_ids=[511, *passes[2]["input_ids"][1:]])
    with refused("does not begin with the prompt"): rebuild(dump, row | {"prompt_ids": [1, 2, 3]}, 4)


def test_dump_finds_and_calls(dump, tmp_path):
    "A method whose object cannot be built is called on a stand-in."
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab/run.py").write_text(f"""
class Evaluator:
    scale = 2
    def _double(self, x): return [t * self.scale for t in x]
    @property
    def limit(self): return self.max_new_tokens
    def {dump.LOOP}(self, input_ids, *, stop_token_ids=None, seed=0):
        return {{"out": [input_ids + self._double(input_ids)[:self.limit], self.draft_model, stop_token_ids]}}
""")
    module, name = dump.find_definition(tmp_path, dump.LOOP)
    assert (module, name) == ("lab.run", f"Evaluator.{dump.LOOP}")
    space = {}
    exec((tmp_path / "lab/run.py").read_text(), space)
    cls, values = space["Evaluator"], {"input_ids": [3, 4], "max_new_tokens": 1, "drafter": "D", "stop_token_ids": [9]}
    result = dump.call_reference(getattr(cls, dump.LOOP), cls, values)
    assert result == {"out": [[3, 4, 6], "D", [9]]}
    assert dump.find_ids({"ids": [[3, 4, 6]]}, [3, 4]) == [3, 4, 6]
    assert dump.find_ids((None, np.array([3, 4, 6])), [3, 4]) == [3, 4, 6]
    assert dump.find_ids({"ids": [1]}, [3, 4]) is None
    with pytest.raises(SystemExit, match="0 definitions of Nothing"): dump.find_definition(tmp_path, "Nothing")
    with pytest.raises(SystemExit, match="no value for wand; add --bind"): dump.call_reference(lambda wand: 0, None, values)
    with pytest.raises(AttributeError, match="self.wand"): dump.StandIn(cls, values).wand


def test_dump_reads_prompts(dump, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt_ids": [1, 2]}\n\n{"prompt_ids": [3]}\n{"prompt_ids": [4]}\n')
    assert dump.read_prompts(path, 2, None) == [([1, 2], False), ([3], False)]
    path.write_text("plain text\n")
    with pytest.raises(SystemExit, match="need a tokenizer"): dump.read_prompts(path, 1, None)
