"""A packed file holds, bit for bit, what mlx-lm loads: families, forms of checkpoints, quantizations, kills, damage."""
import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import mlx_spark  # noqa: F401  (preloads BLAS before mlx)
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from test_expert_trace import COMMON, E, FAMILIES, K, build

from mlx_spark import expert_file
from mlx_spark.expert_file import (
    BIN, JOURNAL, JSON, LAYOUTS, PAGE, PART, add_arguments, open_experts, pack_experts, plan_experts, run, verify_experts, write_experts)
from mlx_spark.expert_trace import expert_bytes, moe_modules, n_experts


def config_of(family, **changes):
    config = COMMON | dict(model_type=family) | FAMILIES.get(family, {}) | changes
    return dict(model_type=family, text_config=config) if family == "llama4" else config


def save(folder, model, config, weights=None, files=1):
    "An mlx-lm folder of one safetensors file or more."
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(model.parameters())) if weights is None else weights
    names = sorted(weights)
    for i in range(files):
        mx.save_safetensors(str(folder / f"model-{i}.safetensors"), {n: weights[n] for n in names[i::files]})
    return folder


def check(folder, out, source=None):
    "The file holds exactly the loaded model's stacked tensors."
    model, _ = load_model(folder)
    params, found = dict(tree_flatten(model.parameters())), set()
    paths = {id(m): p for p, m in model.named_modules()}
    with open_experts(out, config=folder, verify=True) as file:
        for layer, switch in moe_modules(model).items():
            assert file.experts(layer) == n_experts(switch) and file.expert_bytes[layer] == expert_bytes(switch)
            names = {f"{paths[id(switch)]}.{n}" for n, _ in tree_flatten(switch.parameters())}
            found |= names
            assert {n for n in file.tensors if file.tensors[n].layer == layer} == names - set(file.manifest.resident)
            for e in range(file.experts(layer)):
                covered = b"".join(os.pread(file.fd, n, at) for at, n in file.extents(layer, e))
                assert len(covered) >= file.expert_bytes[layer]
                for t in file.of_layer[layer]:
                    want = np.array(params[t.name][e:e + 1].view(mx.uint8)).tobytes()
                    assert file.read(t.name, e) == want and want in covered, t.name
        assert all(t.offset % PAGE == 0 for t in file.tensors.values()) or file.manifest.layout == "expert"
        assert all(file.extents(layer, 1)[0][0] % PAGE == 0 for layer in file.layers) or file.manifest.layout == "tensor"
        assert set(file.manifest.resident) == {n for n in found if n.endswith(".bias")}
        return file.manifest


@pytest.mark.parametrize("bits", [None, 4], ids=["fp", "4bit"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_as_mlx_lm_saves_them(tmp_path, family, bits):
    config = config_of(family) | ({"quantization": {"group_size": 32, "bits": bits}} if bits else {})
    folder = save(tmp_path / "model", build(family, bits=bits), config, files=2)
    for layout in LAYOUTS:
        pack_experts(folder, tmp_path / layout, layout=layout, verify=True, progress=False)
        m = check(folder, tmp_path / layout)
        assert bool(m.resident) == (family == "gpt_oss")


# --- checkpoints whose experts are apart, or whose gate and up projections are one tensor --------------------------------

APART = {  # family: (module in the model, prefix of one expert in the checkpoint, names of projections)
    "qwen3_moe": ("mlp.switch_mlp", "mlp.experts", {}), "qwen2_moe": ("mlp.switch_mlp", "mlp.experts", {}),
    "olmoe": ("mlp.switch_mlp", "mlp.experts", {}), "deepseek_v2": ("mlp.switch_mlp", "mlp.experts", {}),
    "deepseek_v3": ("mlp.switch_mlp", "mlp.experts", {}), "glm4_moe": ("mlp.switch_mlp", "mlp.experts", {}),
    "dots1": ("mlp.experts", "mlp.experts", {}), "ernie4_5_moe": ("mlp.switch_mlp", "mlp.experts", {}),
    "mixtral": ("block_sparse_moe.switch_mlp", "block_sparse_moe.experts", dict(gate_proj="w1", down_proj="w2", up_proj="w3")),
    "phimoe": ("block_sparse_moe.switch_mlp", "block_sparse_moe.experts", dict(gate_proj="w1", down_proj="w2", up_proj="w3")),
    "lfm2_moe": ("feed_forward.switch_mlp", "feed_forward.experts", dict(gate_proj="w1", down_proj="w2", up_proj="w3")),
    "nemotron_h": ("mixer.switch_mlp", "mixer.experts", dict(fc1="up_proj", fc2="down_proj")),
}

def apart(family, weights):
    "The weights with one tensor for each expert."
    module, prefix, names = APART[family]
    out = {}
    for name, w in weights.items():
        head, found, tail = name.partition(f".{module}.")
        if not found:
            out[name] = w
            continue
        proj, leaf = tail.split(".")
        for e in range(E): out[f"{head}.{prefix}.{e}.{names.get(proj, proj)}.{leaf}"] = w[e]
    assert len(out) > len(weights)
    return out

@pytest.mark.parametrize("family", APART)
def test_checkpoints_with_experts_apart(tmp_path, family):
    model = build(family)
    folder = save(tmp_path / "model", model, config_of(family), apart(family, dict(tree_flatten(model.parameters()))), files=3)
    for layout in LAYOUTS:
        pack_experts(folder, tmp_path / layout, layout=layout, verify=True, progress=False)
        check(folder, tmp_path / layout)

def joined(weights, module, prefix, *, swap=False, axis=-2):
    "Gate and up projection as one tensor."
    out = {n: w for n, w in weights.items() if f".{module}." not in n}
    for name, gate in weights.items():
        head, found, tail = name.partition(f".{module}.gate_proj.weight")
        if not found: continue
        up, down = (weights[f"{head}.{module}.{p}.weight"] for p in ("up_proj", "down_proj"))
        turn = (lambda w: w.swapaxes(1, 2)) if swap else (lambda w: w)
        out[f"{head}.{prefix}gate_up_proj"] = mx.concatenate([turn(gate), turn(up)], axis=axis)
        out[f"{head}.{prefix}down_proj"] = mx.contiguous(turn(down))
    return out

@pytest.mark.parametrize("family, module, prefix, options", [
    ("gemma4_text", "experts.switch_glu", "experts.", {}), ("llama4", "feed_forward.experts", "feed_forward.experts.", dict(swap=True, axis=-1))])
def test_checkpoints_with_gate_and_up_in_one(tmp_path, family, module, prefix, options):
    model = build(family)
    weights = joined(dict(tree_flatten(model.parameters())), module, prefix, **options)
    folder = save(tmp_path / "model", model, config_of(family), weights)
    for layout in LAYOUTS:
        pack_experts(folder, tmp_path / layout, layout=layout, verify=True, progress=False)
        check(folder, tmp_path / layout)

def test_original_gpt_oss_blocks(tmp_path):
    "As OpenAI publishes it: interleaved gate and up, four-bit blocks and scales as bytes, a bias for each expert."
    model = build("gpt_oss")
    weights = {n: w for n, w in tree_flatten(model.parameters()) if ".experts." not in n}
    rng = np.random.default_rng(0)
    for layer in (0, 1):
        for proj, out, inner in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
            at = f"model.layers.{layer}.mlp.experts.{proj}"
            weights[f"{at}_blocks"] = mx.array(rng.integers(0, 256, (E, out, inner // 32, 16)), mx.uint8)
            weights[f"{at}_scales"] = mx.array(rng.integers(120, 130, (E, out, inner // 32)), mx.uint8)
            weights[f"{at}_bias"] = mx.array(rng.standard_normal((E, out)), mx.float32)
    config = config_of("gpt_oss") | {"quantization_config": {"quant_method": "mxfp4"}}
    folder = save(tmp_path / "model", model, config, weights)
    for layout in LAYOUTS:
        m = pack_experts(folder, tmp_path / layout, layout=layout, verify=True, progress=False)
        check(folder, tmp_path / layout)
        assert m.quantization["model.layers.0.mlp.experts.up_proj"] == {"group_size": 32, "bits": 4, "mode": "mxfp4"}
        assert len(m.resident) == 6 and len(m.tensors) == 2 * 6


# --- quantizations -----------------------------------------------------------------------------------------------------

MODES = {f"affine{b}": dict(group_size=32, bits=b, mode="affine") for b in (2, 3, 4, 5, 6, 8)} | dict(
    mxfp4=dict(group_size=32, bits=4, mode="mxfp4"), nvfp4=dict(group_size=16, bits=4, mode="nvfp4"), mxfp8=dict(group_size=32, bits=8, mode="mxfp8"))

@pytest.mark.parametrize("scales", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
def test_quantizations(tmp_path, mode, scales):
    model = build("qwen3_moe", hidden_size=128, moe_intermediate_size=64)
    model.set_dtype(getattr(mx, scales))
    nn.quantize(model, **MODES[mode], class_predicate=lambda p, m: hasattr(m, "to_quantized") and not p.endswith("mlp.gate"))
    folder = save(tmp_path / "model", model, config_of("qwen3_moe", hidden_size=128, moe_intermediate_size=64) | {"quantization": MODES[mode]})
    for layout in LAYOUTS:
        m = pack_experts(folder, tmp_path / layout, layout=layout, verify=True, progress=False)
        check(folder, tmp_path / layout)
        assert set(map(json.dumps, m.quantization.values())) == {json.dumps(MODES[mode])}
        kinds = {n.rpartition(".")[2]: t.dtype for n, t in m.tensors.items()}
        assert kinds == (dict(weight="uint32", scales=scales, biases=scales) if mode[:3] == "aff" else dict(weight="uint32", scales="uint8"))

def test_global_scale_is_a_tensor_of_the_file(tmp_path):
    model, q = build("qwen3_moe"), MODES["nvfp4"] | {"global_scale": True}
    nn.quantize(model, class_predicate=lambda p, m: q if "switch_mlp" in p and hasattr(m, "to_quantized") else False)
    folder = save(tmp_path / "model", model, config_of("qwen3_moe") | {"quantization": MODES["nvfp4"]})
    for layout in LAYOUTS:
        m = pack_experts(folder, tmp_path / layout, layout=layout, verify=True, progress=False)
        check(folder, tmp_path / layout)
        t = m.tensors["model.layers.1.mlp.switch_mlp.up_proj.global_scale"]
        assert (t.shape, t.dtype, t.slice_bytes) == ((E,), "float32", 4)

def test_each_module_has_its_own_quantization(tmp_path):
    model, layers = build("qwen3_moe"), {}
    for i, bits in enumerate((3, 8)):
        for proj in ("gate_proj", "up_proj"): layers[f"model.layers.{i}.mlp.switch_mlp.{proj}"] = dict(group_size=32, bits=bits, mode="affine")
    layers["model.layers.0.mlp.switch_mlp.down_proj"] = MODES["mxfp4"]
    nn.quantize(model, class_predicate=lambda p, m: layers.get(p, False))
    folder = save(tmp_path / "model", model, config_of("qwen3_moe") | {"quantization": dict(group_size=64, bits=4) | layers})
    for layout in LAYOUTS:
        m = pack_experts(folder, tmp_path / layout, layout=layout, verify=True, progress=False)
        check(folder, tmp_path / layout)
        assert {k: v for k, v in m.quantization.items() if v} == layers and len(m.quantization) == 9

@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_unquantized_and_cast(tmp_path, dtype):
    model = build("mixtral")
    model.set_dtype(getattr(mx, dtype))
    folder = save(tmp_path / "model", model, config_of("mixtral"))
    m = pack_experts(folder, tmp_path / "own", verify=True, progress=False)
    check(folder, tmp_path / "own")
    assert {t.dtype for t in m.tensors.values()} == {dtype}
    m = pack_experts(folder, tmp_path / "cast", dtype=mx.float32, verify=True, progress=False)
    assert {t.dtype for t in m.tensors.values()} == {m.dtype} == {"float32"}
    with open_experts(tmp_path / "cast") as file:
        name = next(iter(m.tensors))
        want = dict(tree_flatten(model.parameters()))[name][2].astype(mx.float32)
        assert file.read(name, 2) == np.array(want).tobytes()


# --- memory --------------------------------------------------------------------------------------------------------------

MEASURE = """
import sys, mlx_spark, mlx.core as mx
from mlx_spark.expert_file import pack_experts, _plan
def hwm(): return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM"))
_plan(sys.argv[1], "tensor", None)          # everything imported, nothing evaluated
mx.clear_cache(); mx.reset_peak_memory()
before = hwm()
m = pack_experts(sys.argv[1], sys.argv[2], layout=sys.argv[3], verify=sys.argv[4] == "verify", progress=False)
print(mx.get_peak_memory(), hwm() - before, before)
"""

@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads VmHWM of /proc")
@pytest.mark.parametrize("form", ["stacked", "apart"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_stays_under_two_layers(tmp_path, layout, form):
    sizes = dict(hidden_size=512, moe_intermediate_size=512, num_hidden_layers=6)
    model = build("qwen3_moe", **sizes)
    weights = dict(tree_flatten(model.parameters()))
    layer = E * expert_bytes(moe_modules(model)[0])
    folder = save(tmp_path / "model", model, config_of("qwen3_moe", **sizes), apart("qwen3_moe", weights) if form == "apart" else weights)
    del model, weights
    out = subprocess.run([sys.executable, "-c", MEASURE, folder, tmp_path / "out", layout, "verify"], capture_output=True, text=True, check=True).stdout
    mlx_peak, grown, before = map(int, out.split())
    assert layer == 3 * 8 * 512 * 512 * 4 and mlx_peak < 2 * layer and grown < 2 * layer, (mlx_peak / layer, grown / layer)


# --- kills, and what is found afterwards ------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys, mlx_spark
from mlx_spark import expert_file
at, count = int(sys.argv[4]), 0
def dying(real):
    def call(*args, **kwargs):
        global count
        count += 1
        if count == at: os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    return call
for name in ("fsync", "replace", "pwrite"): setattr(os, name, dying(getattr(os, name)))
expert_file.write_atomic = dying(expert_file.write_atomic)
expert_file.pack_experts(sys.argv[1], sys.argv[2], layout=sys.argv[3], progress=False)
print(count)
"""

def killed(folder, out, layout, at):
    done = subprocess.run([sys.executable, "-c", KILLED, folder, out, layout, str(at)], capture_output=True, text=True)
    assert done.returncode == (-9 if at else 0), done.stderr
    return int(done.stdout) if not at else None

@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "many"])
def test_a_killed_packer_goes_on(tmp_path, monkeypatch, every):
    folder = save(tmp_path / "model", build("qwen3_moe"), config_of("qwen3_moe"))
    steps = killed(folder, tmp_path / "whole", "tensor", 0)
    whole = {n: (tmp_path / "whole" / n).read_bytes() for n in (BIN, JSON)}
    written = []
    real = expert_file._layer_bytes
    monkeypatch.setattr(expert_file, "_layer_bytes", lambda m, layer, arrays: (written.append(layer), real(m, layer, arrays))[1])
    again = set()
    for at in sorted({*range(1, steps, 4), *range(steps - 7, steps + 1)}) if every else (2, steps // 2, steps - 3, steps):
        out = tmp_path / f"killed{at}"
        killed(folder, out, "tensor", at)
        if (out / BIN).exists() and (out / JSON).exists(): open_experts(out, verify=True).close()
        else:
            with pytest.raises(FileNotFoundError, match="missing"): open_experts(out)
        noted = json.loads((out / JOURNAL).read_text())["layers"] if (out / JOURNAL).exists() else {}
        complete = (out / BIN).exists()
        written.clear()
        pack_experts(folder, out, progress=False)
        assert written == ([] if complete else [layer for layer in range(3) if str(layer) not in noted])
        assert {n: (out / n).read_bytes() for n in (BIN, JSON)} == whole and len(list(out.iterdir())) == 3
        again.add(len(written))
    assert again == {0, 1, 2, 3} if every else {0, 3} < again

def test_unfinished_says_how_to_go_on(tmp_path, monkeypatch):
    folder = save(tmp_path / "model", build("qwen3_moe"), config_of("qwen3_moe"))
    plan, arrays = expert_file._plan(folder, "tensor", None)
    def until(layer):
        if layer == 2: raise KeyboardInterrupt
        return {n: a for n, a in arrays.items() if f"layers.{layer}." in n}
    with pytest.raises(KeyboardInterrupt): write_experts(tmp_path / "out", plan, until, progress=False)
    with pytest.raises(FileNotFoundError, match="only an unfinished one: run pack-experts again"): open_experts(tmp_path / "out")
    other = pack_experts(folder, tmp_path / "out", layout="expert", progress=False)         # another plan starts from nothing
    check(folder, tmp_path / "out")
    assert other.layout == "expert"

def test_a_journal_of_other_weights_is_not_continued(tmp_path):
    "The same sizes, so only the plan's checksum tells."
    model, config = build("qwen3_moe"), config_of("qwen3_moe")
    folder = save(tmp_path / "model", model, config)
    plan, arrays = expert_file._plan(folder, "tensor", None)
    def until(layer):
        if layer == 2: raise KeyboardInterrupt
        return {n: a for n, a in arrays.items() if f"layers.{layer}." in n}
    with pytest.raises(KeyboardInterrupt): write_experts(tmp_path / "out", plan, until, progress=False)
    other = save(tmp_path / "other", model, config, {n: w + 1 for n, w in tree_flatten(model.parameters())})
    pack_experts(other, tmp_path / "out", verify=True, progress=False)
    check(other, tmp_path / "out")

def test_a_finished_file_is_left_alone_and_another_refused(tmp_path):
    folder = save(tmp_path / "model", build("qwen3_moe"), config_of("qwen3_moe"))
    out = tmp_path / "out"
    pack_experts(folder, out, progress=False)
    stamp = (out / BIN).stat()
    assert pack_experts(folder, out, progress=False).layout == "tensor"
    assert (out / BIN).stat() == stamp
    with pytest.raises(ValueError, match="layout 'tensor', which differ from those of 'model', layout 'expert', in layout, tensors"):
        pack_experts(folder, out, layout="expert", progress=False)
    other = save(tmp_path / "mixtral", build("mixtral"), config_of("mixtral"))
    with pytest.raises(ValueError, match="holds the experts of 'model'"): pack_experts(other, out, progress=False)

def test_two_packers_do_not_mix(tmp_path):
    import fcntl
    folder = save(tmp_path / "model", build("qwen3_moe"), config_of("qwen3_moe"))
    (tmp_path / "out").mkdir()
    with open(tmp_path / "out" / PART, "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is packing into"): pack_experts(folder, tmp_path / "out", progress=False)

def test_full_disk_is_told_before_writing(tmp_path, monkeypatch):
    folder = save(tmp_path / "model", build("qwen3_moe"), config_of("qwen3_moe"))
    monkeypatch.setattr(expert_file.shutil, "disk_usage", lambda path: argparse.Namespace(free=100_000))
    with pytest.raises(OSError, match="GB more are needed for experts of 0.00 GB, 0.00 GB are free"): pack_experts(folder, tmp_path / "out", progress=False)
    assert (tmp_path / "out" / PART).stat().st_size == 0


# --- damaged, foreign and newer files -------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("packed")
    folder = save(tmp / "model", build("qwen3_moe"), config_of("qwen3_moe"))
    pack_experts(folder, tmp / "out", progress=False)
    return folder, tmp / "out"

def copy(packed, tmp_path):
    import shutil
    return Path(shutil.copytree(packed[1], tmp_path / "copy"))

def test_truncated(packed, tmp_path):
    out = copy(packed, tmp_path)
    size = (out / BIN).stat().st_size
    os.truncate(out / BIN, size - 1)
    with pytest.raises(ValueError, match=f"has {size - 1} bytes, its manifest says {size}: it was cut short"): open_experts(out)
    os.truncate(out / BIN, size + 7)
    with pytest.raises(ValueError, match="it was altered"): open_experts(out)
    pack_experts(packed[0], out, progress=False)                                  # a damaged file is written anew
    open_experts(out, verify=True).close()

def test_altered(packed, tmp_path):
    out = copy(packed, tmp_path)
    with open(out / BIN, "r+b") as f:
        f.seek(2 * PAGE + 5)
        byte = f.read(1)[0]
        f.seek(2 * PAGE + 5)
        f.write(bytes([byte ^ 1]))
    open_experts(out, verify=False).close()                                          # one bit inside is found by a full read only
    for verify in (None, True):
        with pytest.raises(ValueError, match="was altered: layer 0 has sha256"): open_experts(out, verify=verify)
    with pytest.raises(ValueError, match="was altered: layer 0"): verify_experts(out, packed[0], progress=False)

def test_a_copy_is_read_once(packed, tmp_path, monkeypatch):
    read = []
    digest = expert_file._region_sha256
    monkeypatch.setattr(expert_file, "_region_sha256", lambda *a: read.append(a) or digest(*a))
    out = copy(packed, tmp_path)
    os.utime(out / BIN)
    open_experts(out).close()
    layers = len(read)
    open_experts(out).close()
    assert layers == len(read) > 0
    pack_experts(packed[0], tmp_path / "fresh", progress=False)
    open_experts(tmp_path / "fresh").close()
    assert layers == len(read)                                                       # just written: not read again

def test_wrong_in_the_source_is_found_by_comparing(packed, tmp_path):
    plan, arrays = expert_file._plan(packed[0], "tensor", None)
    name = "model.layers.1.mlp.switch_mlp.up_proj.weight"
    arrays[name] = arrays[name] + (mx.arange(E) == 5)[:, None, None]
    write_experts(tmp_path / "out", plan, lambda layer: {n: a for n, a in arrays.items() if f"layers.{layer}." in n}, progress=False)
    open_experts(tmp_path / "out", config=packed[0], verify=True).close()            # sound in itself
    with pytest.raises(ValueError, match=f"{name} differs from the source in expert 5"): verify_experts(tmp_path / "out", packed[0], progress=False)

def test_halves_of_two_packings(packed, tmp_path):
    out = copy(packed, tmp_path)
    other = save(tmp_path / "other", build("mixtral", num_hidden_layers=3), config_of("mixtral"))
    pack_experts(other, tmp_path / "mixtral", progress=False)
    os.replace(tmp_path / "mixtral" / BIN, out / BIN)
    with pytest.raises(ValueError, match="not of the same packing as its manifest"): open_experts(out)

def test_edited_manifest(packed, tmp_path):
    out = copy(packed, tmp_path)
    text = (out / JSON).read_text()
    (out / JSON).write_text(text.replace('"version": 1', '"version": 7'))
    with pytest.raises(ValueError, match="has version 7, this program reads version 1"): open_experts(out)
    (out / JSON).write_text(text.replace('"bits": ', '"bit": ').replace('"offset": 16384', '"offset": 32768', 1))
    with pytest.raises(ValueError, match="experts.json was altered: sha256"): open_experts(out)
    m = expert_file.read_manifest(packed[1] / JSON)
    name, t = next(iter(m.tensors.items()))
    moved = expert_file.replace(m, tensors=m.tensors | {name: expert_file.replace(t, offset=0)})
    (out / JSON).write_text(expert_file._dumps(moved))
    with open(out / BIN, "r+b") as f: f.write(expert_file._header(moved))
    with pytest.raises(ValueError, match="the tensors do not lie where the layout 'tensor' puts them"): open_experts(out)

def test_foreign_model(packed, tmp_path):
    folder, out = packed
    config = json.loads((folder / "config.json").read_text())
    _, completed = load_model(folder, lazy=True)
    for mine in (folder, str(folder), config, completed, config | {"eos_token_id": 5}): open_experts(out, config=mine).close()
    with pytest.raises(ValueError, match=r"experts of 'model' \(qwen3_moe\), made for another configuration: sha256"):
        open_experts(out, config=config | {"num_experts_per_tok": 3})
    model = build("qwen3_moe")
    model.lm_head.weight = model.lm_head.weight + 1
    twin = save(tmp_path / "twin", model, config)
    with pytest.raises(ValueError, match="made from other weights of the same configuration: fingerprint"): open_experts(out, config=twin)

def test_completed_configuration_is_known(tmp_path):
    "mlx-lm writes into the configuration it loads (quantization of foreign formats); both forms open the file."
    model = build("qwen3_moe")
    nn.quantize(model, **MODES["mxfp4"])
    config = config_of("qwen3_moe") | {"quantization_config": {"quant_method": "mxfp4"}}
    folder = save(tmp_path / "model", model, config)
    pack_experts(folder, tmp_path / "out", progress=False)
    _, completed = load_model(folder, lazy=True)
    assert completed != config
    for mine in (config, completed, folder): open_experts(tmp_path / "out", config=mine).close()

def test_a_replaced_file_stays_readable(packed, tmp_path):
    out = copy(packed, tmp_path)
    file = open_experts(out)
    name = next(iter(file.tensors))
    before = file.read(name, 3)
    (out / "new").write_bytes(b"\0" * file.size)
    os.replace(out / "new", out / BIN)
    assert file.read(name, 3) == before
    file.close()

def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no file of experts"): open_experts(tmp_path)
    with pytest.raises(FileNotFoundError, match="is no folder and no downloaded model"): pack_experts(tmp_path / "no", tmp_path / "out")


# --- the command ------------------------------------------------------------------------------------------------------------

def command(*argv):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(a) for a in argv]))

def test_command(packed, tmp_path, capsys):
    folder, _ = packed
    assert command(folder, "--out", tmp_path / "x", "--layout", "expert", "--dtype", "bfloat16", "--verify", "--json") == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["layout"] == "expert" and said["dtype"] == "bfloat16" and said["tensors_compared"] == 9 and said["moe_layers"] == 3
    with open_experts(tmp_path / "x", config=folder) as file: assert said["file_bytes"] == file.size
    assert command(folder, "--out", tmp_path / "y") == 0
    assert "3 MoE layers" in capsys.readouterr().out
    llama = save(tmp_path / "llama", build("llama"), config_of("llama"))
    with pytest.raises(ValueError, match="there are no experts to pack: llama has no MoE layer"): command(llama, "--out", tmp_path / "z")
    assert not (tmp_path / "z").exists()
