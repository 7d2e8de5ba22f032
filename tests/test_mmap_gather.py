"""Logits of models whose experts are mapped from a file equal those of the resident model in every bit: families, quantizations, ways of running, states of memory."""
import json
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path

import mlx_spark  # noqa: F401  (preloads BLAS before mlx)
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from test_expert_trace import COMMON, FAMILIES

from mlx_spark.expert_file import open_experts, pack_experts, plan_experts, write_experts
from mlx_spark.expert_trace import _recording, _restore, _swap, moe_modules
from mlx_spark.mmap_gather import load_offloaded, map_experts
from mlx_spark.targets import save_tiny, tiny_target

V = 64
WIDE = dict(hidden_size=128, moe_intermediate_size=128, intermediate_size=128, vocab_size=V)   # slices of several pages
MODES = {**{f"affine{b}": dict(bits=b, group_size=32, mode="affine") for b in (2, 3, 4, 5, 6, 8)}, "mxfp4": dict(bits=4, group_size=32, mode="mxfp4"),
         "nvfp4": dict(bits=4, group_size=16, mode="nvfp4"), "nvfp4-scaled": dict(bits=4, group_size=16, mode="nvfp4"), "mxfp8": dict(bits=8, group_size=32, mode="mxfp8"), "f32": None}
CASES = [(family, mode, "tensor") for family, mode in zip(
    ("qwen3_moe", "qwen2_moe", "qwen3_next", "mixtral", "olmoe", "gpt_oss", "gemma4_text", "deepseek_v2", "deepseek_v3", "glm4_moe", "nemotron_h", "lfm2_moe", "granitemoe"),
    ("affine4", "affine2", "affine8", "affine3", "affine6", "mxfp4", "affine5", "nvfp4", "affine4", "mxfp8", "f32", "affine4", "nvfp4"))]
CASES += [("qwen3_moe", mode, "expert") for mode in MODES if mode != "nvfp4-scaled"] + [("gpt_oss", "affine4", "expert"), ("qwen3_moe", "f32", "tensor"), ("gpt_oss", "f32", "expert")]


def build(family, mode):
    config = {"model_type": family} | COMMON | FAMILIES[family] | {k: v for k, v in WIDE.items() if k not in FAMILIES[family]}
    module = import_module(f"mlx_lm.models.{family}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    experts = [leaf for switch in moe_modules(model).values() for _, leaf in switch.named_modules() if hasattr(leaf, "to_quantized")]
    options = MODES[mode] and MODES[mode] | ({"global_scale": True} if mode == "nvfp4-scaled" else {})
    if options: nn.quantize(model, class_predicate=lambda path, m: options if any(m is leaf for leaf in experts) else False)
    model.eval()
    mx.eval(model.parameters())
    return model


class Between:
    "Calls `act(layer)` before each expert module works, after everything before it was computed."
    def __init__(self, model, act):
        self.layer_of, self.act = {id(m): layer for layer, m in moe_modules(model).items()}, act
        self.swapped = _swap([*moe_modules(model).values()], lambda cls: _recording(cls, self.note))
    def note(self, switch, x, ids):
        mx.eval(x, ids)
        self.act(self.layer_of[id(switch)])
    def remove(self): _restore(self.swapped)


def passes(model, evict=lambda: None):
    "Logits of a sorted prefill (80 tokens, 2 experts each), of decoding, and of a batch."
    rng, out = np.random.default_rng(0), []
    cache = make_prompt_cache(model)
    for n in (80, 1, 1, 5, 1):
        out.append(model(mx.array(rng.integers(0, V, (1, n))), cache=cache))
        mx.eval(out[-1])
        evict()
    out.append(model(mx.array(rng.integers(0, V, (3, 7)))))
    mx.eval(out[-1])
    return out


def same(found, wanted): return all(mx.array_equal(a, b).item() for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("family,mode,layout", CASES, ids=["-".join(c) for c in CASES])
def test_same_bits(tmp_path, family, mode, layout):
    resident, mapped = build(family, mode), build(family, mode)
    plan, arrays = plan_experts(resident, layout)
    write_experts(tmp_path, plan, lambda layer: {n: a for n, a in arrays.items() if plan.tensors[n].layer == layer}, progress=False)
    wanted = passes(resident)
    assert all(mx.isfinite(a).all().item() for a in wanted)
    with open_experts(tmp_path) as file:
        experts, rng = map_experts(mapped, file), np.random.default_rng(1)
        assert same(passes(mapped), wanted)
        experts.drop_all(from_cache=True)
        assert experts.resident_bytes() == 0
        assert same(passes(mapped, lambda: experts.drop_all(from_cache=True)), wanted)     # everything leaves after every token
        dropped = []
        def some(layer):                                                                   # and at random between the layers
            for l in file.layers: dropped.extend(experts.drop(l, int(e), from_cache=True) for e in rng.integers(0, file.experts(l), 3))
            experts.read([(layer, int(e)) for e in set(rng.integers(0, file.experts(layer), 2).tolist())], threads=2)
        between = Between(mapped, some)
        assert same(passes(mapped), wanted)
        between.remove()
        assert sum(dropped) > 0
        del mapped, between
        experts.release()


@pytest.mark.parametrize("layout", ("tensor", "expert"))
def test_global_scales_are_read_not_mapped(tmp_path, layout):
    "MLX uses them on a GPU only; here they are compared as they are."
    resident, mapped = build("qwen3_moe", "nvfp4-scaled"), build("qwen3_moe", "nvfp4-scaled")
    plan, arrays = plan_experts(resident, layout)
    write_experts(tmp_path, plan, lambda layer: {n: a for n, a in arrays.items() if plan.tensors[n].layer == layer}, progress=False)
    experts, found = map_experts(mapped, open_experts(tmp_path)), dict(tree_flatten(mapped.parameters()))
    assert sum(k.endswith("global_scale") for k in found) == 9 and not any(k.endswith("global_scale") for k in experts.views)
    for k, v in tree_flatten(resident.parameters()): assert mx.array_equal(found[k], v), k
    assert experts.read([(0, 1)]) >= experts.expert_file.expert_bytes[0] - 3 * 4


def test_nothing_is_copied_by_a_strided_gather(tmp_path):
    "A sorted prefill and a decode step over records allocate no more than over dense tensors, and far less than the experts."
    peaks = {}
    for layout in ("tensor", "expert"):
        model = tiny_target("qwen3_moe", bits=4, hidden_size=256, moe_intermediate_size=1024, num_experts=16)[0]
        plan, arrays = plan_experts(model, layout)
        write_experts(tmp_path / layout, plan, lambda layer: {n: a for n, a in arrays.items() if plan.tensors[n].layer == layer}, progress=False)
        del arrays
        experts = map_experts(model, open_experts(tmp_path / layout))
        for name, T in (("prefill", 64), ("decode", 1)):
            ids = mx.array(np.random.default_rng(0).integers(0, 200, (1, T)))
            mx.eval(model(ids))
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            mx.eval(model(ids))
            peaks[layout, name] = mx.get_peak_memory() - before
    layer_bytes = experts.expert_file.expert_bytes[0] * 16
    assert peaks["expert", "decode"] < layer_bytes / 8
    for name in ("prefill", "decode"): assert peaks["expert", name] < 1.1 * peaks["tensor", name] + 4096


START = """
import json, sys
import mlx_spark, mlx.core as mx
from mlx_spark.mmap_gather import _status_kb, load_offloaded, memory_now
before, cold = memory_now(), mx.get_active_memory()
model, tokenizer, experts = load_offloaded(sys.argv[1], sys.argv[2])
after = memory_now()
mx.eval(model(mx.array([[1, 2, 3]])))
print(json.dumps(dict(before=before, after=after, ran=memory_now(), pool=sum(t.bytes for t in experts.expert_file.tensors.values()), largest=max(t.bytes for t in experts.expert_file.tensors.values()))))
"""


def test_start_up_never_holds_the_experts(tmp_path):
    "In a process of its own: anonymous memory after loading is that of everything but the experts, and the model's first pass adds few pages."
    config = dict(hidden_size=256, moe_intermediate_size=2048, num_experts=32)
    model, tokenizer = tiny_target("qwen3_moe", bits=4, **config)
    folder = tmp_path / "model"
    save_tiny(folder, "qwen3_moe", bits=4)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    pack_experts(folder, tmp_path / "experts", progress=False)
    said = subprocess.run([sys.executable, "-c", START, str(folder), str(tmp_path / "experts")], capture_output=True, text=True, cwd=Path(mlx_spark.__file__).parents[1])
    assert said.returncode == 0, said.stderr
    m = json.loads(said.stdout)
    assert m["pool"] > 120 << 20
    grown = m["after"]["rss_anon"] - m["before"]["rss_anon"]
    assert grown < 24 << 20                       # the rest of the model and the tokenizer
    assert m["after"]["rss_file"] - m["before"]["rss_file"] < 40 << 20
    assert m["after"]["mlx_active"] > m["pool"]   # what MLX believes
    assert m["ran"]["rss_anon"] - m["before"]["rss_anon"] < 32 << 20


def test_load_in_one_thread_generate_in_another(tmp_path):
    folder = save_tiny(tmp_path / "model", "qwen3_moe", bits=4)
    pack_experts(folder, tmp_path / "experts", progress=False)
    ids, box, wanted = mx.array([[5, 6, 7]]), {}, tiny_target("qwen3_moe", bits=4)[0](mx.array([[5, 6, 7]]))
    def load(): box["model"], _, box["experts"] = load_offloaded(str(folder), tmp_path / "experts")
    def run():
        try: box["logits"] = np.array(box["model"](ids))
        except BaseException as e: box["error"] = e
    for job in (load, run):
        thread = threading.Thread(target=job)
        thread.start()
        thread.join()
    assert "error" not in box, box["error"]
    assert np.array_equal(box["logits"], np.array(wanted))
    box["experts"].drop_all()
    assert mx.array_equal(box["model"](ids), wanted)


@pytest.fixture
def tiny(tmp_path):
    folder = save_tiny(tmp_path / "model", "qwen3_moe", bits=4)
    pack_experts(folder, tmp_path / "experts", progress=False)
    return load_offloaded(str(folder), tmp_path / "experts")


def test_training_is_refused(tiny):
    import mlx.optimizers as optim
    model, _, _ = tiny
    loss = lambda m, ids: m(ids).sum()
    ids, before = mx.array([[1, 2, 3]]), dict(tree_flatten(model.parameters()))
    with pytest.raises(ValueError, match="can't be trained"): model.train()
    with pytest.raises(ValueError, match="can't be trained"): model.unfreeze()
    with pytest.raises(ValueError, match="can't be replaced"):
        mx.value_and_grad(lambda p: model.update(p)(ids).sum())(model.parameters())
    with pytest.raises(ValueError, match="can't be replaced"):
        optim.SGD(learning_rate=.1).update(model, {"model": {"layers": [{"mlp": {"switch_mlp": {"up_proj": {"scales": before["model.layers.0.mlp.switch_mlp.up_proj.scales"]}}}}]}})
    model.freeze()
    model.model.norm.unfreeze()
    value, grads = nn.value_and_grad(model, loss)(model, ids)                     # what is not an expert may learn
    assert {k for k, _ in tree_flatten(grads)} == {"model.norm.weight"}
    for k, v in tree_flatten(model.parameters()): assert "switch" not in k or v is before[k]


def test_a_float_model_is_not_quantized(tmp_path):
    folder = save_tiny(tmp_path / "model", "qwen3_moe")
    pack_experts(folder, tmp_path / "experts", progress=False)
    model, _, _ = load_offloaded(str(folder), tmp_path / "experts")
    with pytest.raises(ValueError, match="can't be quantized"): nn.quantize(model, group_size=32)


def test_adapters_work_on_mapped_experts(tmp_path):
    from mlx_lm.tuner.utils import linear_to_lora_layers
    folder = save_tiny(tmp_path / "model", "qwen3_moe", bits=4)
    pack_experts(folder, tmp_path / "experts", progress=False)
    settings = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj", "mlp.switch_mlp.up_proj"]}
    adapted, _ = tiny_target("qwen3_moe", bits=4)
    plain = adapted(mx.array([[1, 2, 3]]))
    adapted.freeze()
    linear_to_lora_layers(adapted, 2, settings)
    lora = {k: mx.random.normal(v.shape, key=mx.random.key(i)) for i, (k, v) in enumerate(tree_flatten(adapted.trainable_parameters()))}
    assert any("switch_mlp" in k for k in lora)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"num_layers": 2, "lora_parameters": settings}))
    mx.save_safetensors(str(adapter / "adapters.safetensors"), lora)
    adapted.load_weights([*lora.items()], strict=False)
    model, _, experts = load_offloaded(str(folder), tmp_path / "experts", adapter_path=str(adapter))
    found, ids = model(mx.array([[1, 2, 3]])), mx.array([[1, 2, 3]])
    assert mx.array_equal(found, adapted.eval()(ids)) and not mx.array_equal(found, plain)
    experts.drop_all()
    assert mx.array_equal(model(ids), found)


RELEASE = """
import sys
import mlx_spark, mlx.core as mx, numpy as np
from mlx_spark.mmap_gather import load_offloaded
model, tokenizer, experts = load_offloaded(sys.argv[1], sys.argv[2])
ids = mx.array([[1, 2, 3]])
mx.eval(model(ids))
kept = model.model.layers[0].mlp.switch_mlp.up_proj.weight[3:4] if sys.argv[3] == "slice" else None
if kept is not None: mx.eval(kept); wanted = np.array(kept)
if sys.argv[3] != "exit":
    del model
    try: experts.release()
    except RuntimeError as e: print(e)
    if kept is not None: assert np.array_equal(np.array(kept), wanted)
    del kept
for _ in range(3):                                                   # arrays of the regions' sizes, all at the same time
    held = [mx.ones((n,)) for n in [*range(256, 16384, 32), 1 << 18, 1 << 20]]
    mx.eval(held)
    del held
print("alive")
"""


@pytest.mark.parametrize("how", ("clean", "slice", "exit"))
def test_memory_can_be_recycled_after_release(tmp_path, how):
    "MLX hands out freed buffers again; writing to a read-only mapping would kill the process."
    folder = save_tiny(tmp_path / "model", "qwen3_moe", bits=4)
    pack_experts(folder, tmp_path / "experts", progress=False)
    said = subprocess.run([sys.executable, "-c", RELEASE, str(folder), str(tmp_path / "experts"), how], capture_output=True, text=True, cwd=Path(mlx_spark.__file__).parents[1])
    assert said.returncode == 0, (said.returncode, said.stderr)
    assert said.stdout.splitlines() == (["1 regions stay mapped: arrays made from mapped parameters still look at them"] if how == "slice" else []) + ["alive"]


def test_release_refuses_while_the_model_lives(tiny):
    model, _, experts = tiny
    ids = mx.array([[1, 2, 3]])
    wanted = model(ids)
    mx.eval(wanted)
    with pytest.raises(RuntimeError, match="delete the model first"): experts.release()
    experts.drop_all()
    assert mx.array_equal(model(ids), wanted)


def test_a_file_replaced_meanwhile_stays_the_old_one(tmp_path):
    folder = save_tiny(tmp_path / "model", "qwen3_moe", bits=4)
    pack_experts(folder, tmp_path / "experts", progress=False)
    model, _, experts = load_offloaded(str(folder), tmp_path / "experts")
    ids = mx.array([[1, 2, 3]])
    wanted = model(ids)
    mx.eval(wanted)
    new = tmp_path / "new.bin"
    new.write_bytes(bytes(experts.expert_file.size))
    new.rename(experts.expert_file.path)
    experts.drop_all(from_cache=True)
    assert mx.array_equal(model(ids), wanted)


def test_reads_work_without_the_kernels_advice(tiny, monkeypatch):
    "Kernels before 5.14 don't know MADV_POPULATE_READ."
    import mlx_spark.mmap_gather as gather
    model, _, experts = tiny
    advise = gather._advise
    monkeypatch.setattr(gather, "_advise", lambda address, n, advice: advice != gather.MADV_POPULATE_READ and advise(address, n, advice))
    experts.drop_all(from_cache=True)
    assert experts.read([(0, 1), (2, 3)]) == 2 * experts.expert_file.expert_bytes[0]
    assert not experts.can_populate and experts.is_cached(0, 1) and experts.is_cached(2, 3) and experts.resident_bytes() == 0
