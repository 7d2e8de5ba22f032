"The command `mlx_spark` as a shell sees it, and what README.md promises."
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_spark.cli import DEMO_PROMPTS, Parser, available, main, shipped_drafters
from mlx_spark.targets import save_tiny

ROOT = Path(__file__).parents[1]
COMMAND = [str(Path(sys.executable).with_name("mlx_spark"))]
README = (ROOT / "README.md").read_text()
RESULT = ROOT / "benchmarks/results/demo.json"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory): return str(save_tiny(tmp_path_factory.mktemp("models") / "tiny", "llama"))


def shell(*argv, stdin="", **env):
    "Run the console command in a process of its own."
    return subprocess.run([*COMMAND, *argv], input=stdin, env=os.environ | env, cwd=ROOT, capture_output=True, text=True, timeout=300)


# ---- help ----

def test_help_lists_what_is_there():
    done = shell("--help")
    assert done.returncode == 0 and done.stderr == ""
    for name, command in available().items():
        assert re.search(rf"^  {name} +\S", done.stdout, re.M), name
        assert len(command.about) < 80


@pytest.mark.parametrize("name", available())
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as end: main([name, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: mlx_spark {name}")


# ---- generate and demo ----

def test_json_is_the_last_and_only_line(tiny):
    argv = ["generate", "--model", tiny, "--prompt", "-", "--max-tokens", "12", "--draft-model", tiny, "--draft-bits", "6", "--compare", "--json"]
    done = shell(*argv, stdin="to be or not to be")
    assert done.returncode == 0 and done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert result["ids_match"] is True and result["tokens"] == 12
    assert all(result[k] > 0 for k in ("tau", "tok_s", "plain_tok_s", "speedup"))
    assert "Traceback" not in done.stderr and "tokens/s" in done.stderr


def test_the_answer_alone(tiny):
    plain, lookup = (shell("generate", "--model", tiny, "-p", "hello", "-m", "8", "--verbose", "False", *more) for more in ([], ["--draft-model", "ngram"]))
    assert plain.returncode == 0 and plain.stderr == "" and len(plain.stdout) > 1
    assert lookup.stdout == plain.stdout


GOLDENS = ROOT / "goldens/deepspec"
PAIR = ["--model", str(GOLDENS / "targets/qwen3_tiny"), "--draft-model", str(GOLDENS / "drafters/q3_b7_vanilla_cm")]


@pytest.mark.parametrize("row", (0, 1))
def test_a_model_without_tokenizer_is_asked_in_ids(row):
    row = json.loads((GOLDENS / "traces/target_greedy_qwen3_tiny.json").read_text())[row]
    ids, n = ",".join(map(str, row["prompt_ids"])), str(row["max_new_tokens"])
    done = shell("generate", *PAIR, "--prompt-ids", ids, "--max-tokens", n, "--compare", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["ids_match"] is True and result["ids"] == row["greedy_new_tokens"] and result["tau"] > 1
    assert result["draft_bytes"] > 0 and result["draft_bytes_a_round"] > 0 and done.stderr.count("Drafter: ") == 1
    assert " ".join(map(str, result["ids"])) in done.stderr


def test_threshold_without_confidences(tiny, capsys):
    for drafter in (["--draft-model", "ngram"], []):
        assert main(["generate", "--model", tiny, "-m", "2", "--confidence-threshold", "0.5", *drafter]) == 0
        out, err = capsys.readouterr()
        assert "--confidence-threshold 0.5 has no effect" in err and "no effect" not in out


def test_demo(tiny):
    done = shell("demo", "--model", tiny, "--max-tokens", "6", "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 0 and done.stdout.count("\n") == 1
    assert [p["name"] for p in result["prompts"]] == list(DEMO_PROMPTS) and result["ids_match"] is True
    for row in (result, *result["prompts"]): assert {"tau", "tok_s", "plain_tok_s", "ids_match"} <= row.keys()
    assert "ratio" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only MLX's Linux wheel carries a reference BLAS")
def test_demo_says_how_to_leave_the_slow_blas(tiny):
    done = shell("demo", "--model", tiny, "--max-tokens", "2", MLX_SPARK_BLAS="off")
    assert done.returncode == 0 and "BLAS: reference BLAS" in done.stdout
    assert "To change that: unset MLX_SPARK_BLAS" in done.stdout


# ---- trouble ----

@pytest.mark.parametrize("argv,said", [
    (["frobnicate"], "no command 'frobnicate'"),
    (["generate", "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    (["generate", "--model", "/no/such/folder"], "/no/such/folder"),
    (["generate", "--model", "TINY", "--draft-model", "nobody"], "by name there are ngram"),
    (["generate", "--model", "TINY", "--max-tokens", "0"], "max_tokens must be non-zero"),
    (["generate", "--model", "TINY", "--temp", "-1"], "temp must be finite"),
    (["generate", "--model", "TINY", "--temp", "1", "--seed", "-1"], "wanted an integer in 0..2**64-1, got '-1'"),
    (["generate", "--model", "TINY", "--prompt-ids", "1 288"], "the vocabulary is 0..287, got 288"),
    (["generate", "--model", "TINY", "--prompt-ids", "one"], "wanted token ids such as '60 61 62', got 'one'"),
    (["generate", "--model", "TINY", "--prompt-ids", "1", "--prompt", "a"], "not allowed with argument"),
    (["generate", *PAIR, "--prompt", "hello"], "no tokenizer, so text means nothing to it: ask with --prompt-ids"),
    (["generate", "--model", "TINY", "--max-tokens", "9999999999"], "MLX_SPARK_MEMORY_LIMIT_GB"),
])
def test_one_line_and_exit_2(tiny, argv, said, capsys):
    assert main([tiny if a == "TINY" else a for a in argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("mlx_spark") and said in err


def rewritten(source, folder, change):
    "A copy of a model folder with other weights."
    shutil.copytree(source, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(change(weights.read_bytes()))
    return str(folder)


@pytest.mark.parametrize("n", (0, 5, 200, -100))
def test_truncated_weights_name_the_model(tiny, tmp_path, n, capsys):
    cut = lambda source, name: rewritten(source, tmp_path / name, lambda data: data[:n])
    target, drafter = cut(tiny, "target"), cut(PAIR[3], "drafter")
    for argv, said in (
        (["--model", target], f"cannot load target {target}: "),
        (["--model", tiny, "--draft-model", target], f"cannot load draft model {target}: "),
        ([*PAIR[:3], drafter, "--prompt-ids", "60"], f"cannot load draft model {drafter}: "),
    ):
        assert main(["generate", *argv]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and said in err


def test_draft_model_with_other_words(tiny, tmp_path, capsys):
    folder = tmp_path / "swapped"
    shutil.copytree(tiny, folder)
    words = json.loads((folder / "tokenizer.json").read_text())
    vocab = words["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(words))
    assert main(["generate", "--model", tiny, "--draft-model", str(folder)]) == 2
    assert "is not the target's: id 97 is 'b', and 'a' in the target" in capsys.readouterr().err


def test_any_error_is_one_line(monkeypatch, capsys):
    def fail(argv): raise IndexError("list index\nout of range")
    monkeypatch.setattr("mlx_spark.cli.dispatch", fail)
    monkeypatch.delenv("MLX_SPARK_DEBUG", raising=False)
    assert main(["generate"]) == 2
    assert capsys.readouterr().err == "mlx_spark generate: IndexError: list index out of range\n"
    monkeypatch.setenv("MLX_SPARK_DEBUG", "1")
    with pytest.raises(IndexError): main(["generate"])


def test_the_shell_sees_it_too():
    done = shell("generate", "--model", "/no/such/folder")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_debug_shows_the_traceback():
    done = shell("generate", "--model", "/no/such/folder", MLX_SPARK_DEBUG="1")
    assert done.returncode == 1 and "Traceback" in done.stderr


def heeds_interrupts():
    "A process that a shell started in the background ignores SIGINT, and so would its children."
    signal.signal(signal.SIGINT, signal.SIG_DFL)

def endless(tiny):
    "A process that has begun to answer and would go on."
    argv = ["generate", "--model", tiny, "--max-tokens", "1000000"]
    process = subprocess.Popen([*COMMAND, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, preexec_fn=heeds_interrupts)
    assert process.stdout.read(1)
    return process


def test_ctrl_c(tiny):
    process = endless(tiny)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and err.decode().strip() == "mlx_spark generate: interrupted"


def test_reader_that_goes_away(tiny):
    process = endless(tiny)
    process.stdout.close()
    assert process.wait(timeout=120) == 141
    assert process.stderr.read() == b""


# ---- README ----

def blocks(language): return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def test_links_exist():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if not link.startswith("http")]
    assert len(links) > 10
    for link in links: assert (ROOT / link).exists(), link


def test_every_notebook_is_listed_in_order():
    listed = re.findall(r"^\| \[(\w+)\]\(nbs/\1\.ipynb\) \|", README, re.M)
    assert sorted(listed) == sorted(p.stem for p in (ROOT / "nbs").glob("[0-9]*.ipynb"))
    assert [name[:2] for name in listed] == sorted(name[:2] for name in listed)


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z-]+)", "\n".join(blocks("sh")) + "`".join(re.findall(r"`(make [^`]+)`", README)))):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_python_runs(tiny):
    (code,) = blocks("python")
    assert len(code.strip().splitlines()) <= 10
    check_python(code.replace('load_drafter("smollm2-135m-dspark", model)', f'load("{tiny}")[0]').replace('"smollm2-135m"', f'"{tiny}"'))


@pytest.mark.weights
def test_python_runs_as_it_stands(): check_python(blocks("python")[0].replace("max_tokens=128", "max_tokens=16"))


def check_python(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"tokens/s, \d+\.\d\d tokens a cycle", done.stdout)


def test_commands_run(tiny):
    lines = [line for line in "\n".join(blocks("sh")).splitlines() if line.startswith("mlx_spark ")]
    assert len(lines) > 4
    for line in lines: check_flags(*shlex.split(line, comments=True)[1:])
    for line in (line for line in lines if "--compare" in line):
        line = line.replace("smollm2-135m-dspark", "ngram").replace("smollm2-135m", tiny)
        done = shell(*shlex.split(line, comments=True)[1:])
        assert done.returncode == 0 and "ids equal" in done.stdout, done.stderr


def check_flags(name, *argv):
    "The command is there and knows these flags."
    command = available()[name]
    module, parser = importlib.import_module(f"mlx_spark.{command.module}"), Parser()
    getattr(module, command.add)(parser)
    parser.parse_args(argv)


def test_drafters_named_are_shipped():
    assert set(re.findall(r"[\w-]+-dspark\b", README)) == set(shipped_drafters())


def test_table_is_of_the_results_file():
    result = json.loads((ROOT / "benchmarks/results/smollm2_acceptance.json").read_text())
    environment, sets = result["environment"], ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")
    assert f"{environment['date'][:10]}, commit {environment['commit']}, [`benchmarks/results/smollm2_acceptance.json`]" in README
    for name, drafter in (("DSpark", "dspark"), ("DFlash", "dflash")):
        for temp in (0, 1):
            tau = {r["set"]: r["tau"] for r in result["rows"] if (r["drafter"], r["temp"]) == (drafter, temp)}
            cells = [*(tau[s] for s in sets), result["macro_tau"][f"{drafter} T={temp}"]]
            assert f"| {name}, T = {temp} | " + " | ".join(f"{x:.2f}" for x in cells) + " |" in README


def test_figure_is_of_the_results_file():
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs/figures.py")
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    result = json.loads(RESULT.read_text())
    assert figures.caption(result) in (ROOT / "docs/demo.svg").read_text()
    assert result["prompts"] and all(p["ids_match"] or p["ties"] for p in result["prompts"])


def test_what_was_never_run_is_said():
    for text in (README, (GOLDENS / "README.md").read_text()):
        assert re.search(r"dump_deepspec\.py`.*never run against a real", text)
        assert "--prompt-ids \"18 94 109\"" in text
