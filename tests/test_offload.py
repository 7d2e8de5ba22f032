"""A byte budget changes when experts are read and dropped, and nothing else: logits, generated text, counters against replay, shortage, threads."""
import random
import threading
import time
import warnings

import mlx_spark  # noqa: F401  (preloads BLAS before mlx)
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from mlx_lm.models.cache import make_prompt_cache

from mlx_spark.expert_file import open_experts, pack_experts, plan_experts, write_experts
from mlx_spark.expert_trace import ExpertTrace
from mlx_spark.mmap_gather import map_experts
from mlx_spark.offload import POLICIES, Pressure, attach, budget_in_bytes, of
from mlx_spark.residency import LRU, make_policy, replay, run_calls
from mlx_spark.targets import load, save_tiny, tiny_target

WIDE = dict(bits=4, hidden_size=128, moe_intermediate_size=256)       # an expert is 18 whole pages
ONLINE = [name for name in POLICIES if name not in ("belady", "pinned")]
PASSES = (40, 1, 1, 1, 5, 1, 3, 1, 17, 1, 1)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    out = {}
    for family in ("qwen3_moe", "qwen3_next"):
        for layout in ("tensor", "expert"):
            folder = out[family, layout] = tmp_path_factory.mktemp(f"{family}-{layout}")
            plan, arrays = plan_experts(tiny_target(family, **WIDE)[0], layout)
            write_experts(folder, plan, lambda layer: {n: a for n, a in arrays.items() if plan.tensors[n].layer == layer}, progress=False)
    return out


def on_disk(packed, family="qwen3_moe", layout="tensor", **options):
    model, _ = tiny_target(family, **WIDE)
    return model, attach(model, map_experts(model, open_experts(packed[family, layout])), **({"governor": False} | options))


def run(model, passes=PASSES, seed=0, step=mx.eval):
    cache, rng, out = make_prompt_cache(model), np.random.default_rng(seed), []
    for n in passes:
        out.append(model(mx.array(rng.integers(0, 256, (1, n))), cache=cache))
        step(out[-1])
    return out


def same(found, wanted): return all(mx.array_equal(a, b).item() for a, b in zip(found, wanted, strict=True))


@pytest.fixture(scope="module")
def wanted(): return {family: run(tiny_target(family, **WIDE)[0]) for family in ("qwen3_moe", "qwen3_next")}


@pytest.mark.parametrize("layout", ("tensor", "expert"))
@pytest.mark.parametrize("budget", ("0%", "1%", "30%", "100%", "150%"))
def test_budgets(packed, wanted, layout, budget):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model, offload = on_disk(packed, "qwen3_next", layout, budget=budget)
        if budget.startswith("1") and len(budget) > 3: offload.loader.join()
        assert same(run(model), wanted["qwen3_next"])
    assert (offload.policy_name == "layerlfu-strict") == (len(said) == 1) == (budget in ("0%", "1%"))
    decode = offload.counters["decode"]
    assert (decode.tokens, decode.passes) == (sum(n for n in PASSES if n <= 16), sum(n <= 16 for n in PASSES))
    if budget == "0%": assert decode.hits == 0
    assert decode.hits + decode.misses == decode.lookups
    assert offload.mapped.resident_bytes() <= max(offload.budget_bytes, 8 * max(offload.expert_bytes.values())) * (1 if layout == "tensor" else 20 / 18)   # records are padded to 20 pages


@pytest.mark.parametrize("budget", ("-1%", "-3GB", "nonsense", "", None, True, [1], float("nan"), .3, -5))
def test_nonsense_is_refused_before_anything_happens(packed, budget):
    model, _ = tiny_target("qwen3_moe", **WIDE)
    mapped = map_experts(model, open_experts(packed["qwen3_moe", "tensor"]))
    cls = type(model.layers[0].mlp.switch_mlp)
    with pytest.raises(ValueError, match="budget|written"): attach(model, mapped, budget=budget)
    assert of(model) is None and type(model.layers[0].mlp.switch_mlp) is cls


@pytest.mark.parametrize("policy", ONLINE)
def test_a_run_equals_its_replay(packed, wanted, policy):
    "Traced by a hook that knows nothing of budgets; every number, pass by pass."
    options = {"seed": 5} if policy == "random" else {}
    for budget in ("13%", "35%", "70%", "100%"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, offload = on_disk(packed, budget=budget, policy=policy, record=True, **options)
            if budget == "100%": offload.loader.join()
            with ExpertTrace(model) as trace: assert same(run(model, step=trace.step), wanted["qwen3_moe"])
        traced = trace.take()
        played, counted = replay(traced, offload.policy_name, offload.budget_bytes, seed=5), offload.counters
        total = lambda field: sum(getattr(c, field) for c in counted.values())
        for field in ("lookups", "hits", "first_touches", "read_bytes"): assert sum(getattr(played, field)) == total(field), field
        assert [c.hits for _, c in offload.passes][1:] == played.hits_by_step.tolist()[1:]        # the trace calls all but the first pass decode
        assert [c.lookups for _, c in offload.passes][1:] == played.lookups_by_step.tolist()[1:]
        assert [c.read_bytes for _, c in offload.passes][1:] == played.read_by_step.tolist()[1:]
        own = run_calls(offload.calls(), make_policy(offload.policy_name, offload.budget_bytes, offload.expert_bytes, n_experts=8, seed=5))
        assert own.hits == (counted["prefill"].hits, counted["decode"].hits) and own.n_tokens == counted["decode"].tokens
        assert len(offload.resident) * offload.expert_bytes[0] == offload.policy.used_bytes == offload.mapped.resident_bytes() or budget == "100%"
        offload.detach()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(budgets=st.lists(st.integers(0, 120), min_size=1, max_size=5), policy=st.sampled_from(ONLINE), seed=st.integers(0, 9))
def test_the_budget_may_change_at_any_time(packed, budgets, policy, seed):
    model, offload = on_disk(packed, budget="50%", policy=policy, **({"seed": seed} if policy == "random" else {}))
    plain, _ = tiny_target("qwen3_moe", **WIDE)
    changes, rng = iter(budgets), random.Random(seed)
    def change(logits):
        mx.eval(logits)
        if rng.random() < .7: offload.set_budget(f"{next(changes, 50)}%")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert same(run(model, (20, 1, 1, 4, 1), seed, change), run(plain, (20, 1, 1, 4, 1), seed))
    if offload.budget_bytes < offload.pool_bytes and policy not in ("layer", "layerlfu"):
        assert offload.policy.used_bytes <= max(offload.budget_bytes, 8 * offload.expert_bytes[0])
    assert sum(len(e) for e in offload.in_layer.values()) * offload.expert_bytes[0] == offload.policy.used_bytes
    offload.detach()


def test_memory_follows_the_policy_exactly(packed, wanted):
    "After every pass the process has mapped what the policy holds, and not a page more."
    model, offload = on_disk(packed, budget="40%")
    def check(logits):
        mx.eval(logits)
        held = len(offload.resident) * offload.expert_bytes[0]
        assert offload.mapped.resident_bytes() == held <= max(offload.budget_bytes, 8 * offload.expert_bytes[0])
    assert same(run(model, step=check), wanted["qwen3_moe"])


def test_a_batch(packed):
    ids = mx.array(np.random.default_rng(3).integers(0, 256, (4, 9)))
    model, offload = on_disk(packed, budget="20%")
    assert mx.array_equal(model(ids), tiny_target("qwen3_moe", **WIDE)[0](ids))
    assert offload.counters["decode"].lookups == sum(len(set(e)) for e in offload.in_layer.values()) or offload.counters["decode"].evicted


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    model = save_tiny(root / "model", "qwen3_moe", bits=4)
    pack_experts(model, root / "experts", progress=False)
    return str(model), root / "experts"


@pytest.mark.parametrize("budget", ("25%", "100%"))
@pytest.mark.parametrize("source", (None, "lookup", "model"))
def test_generation_and_speculation(folders, budget, source):
    from mlx_spark import PromptLookup, generate
    from mlx_lm import generate as mlx_lm_generate
    draft = lambda model: {"lookup": lambda: PromptLookup(), "model": lambda: tiny_target("qwen3_moe", bits=4)[0], None: lambda: None}[source]()
    model, tokenizer = load(folders[0])
    text = generate(model, tokenizer, "abc" * 8, max_tokens=40)
    offloaded, _ = load(folders[0], expert_offload=folders[1], expert_budget=budget)
    offload = of(offloaded)
    assert generate(offloaded, tokenizer, "abc" * 8, max_tokens=40, num_draft_tokens=4 if source else None, draft_model=draft(offloaded)) == text
    decode = offload.counters["decode"]
    assert decode.tokens >= 40 and decode.misses >= decode.first_touches
    if source != "lookup": assert any(c.tokens > 1 for phase, c in offload.passes if phase) == (source == "model")   # verify passes decode several tokens
    if source is None: assert mlx_lm_generate(offloaded, tokenizer, "abc" * 8, max_tokens=40) == mlx_lm_generate(model, tokenizer, "abc" * 8, max_tokens=40)


def test_adapters(folders, tmp_path):
    import json
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers
    settings = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj", "mlp.switch_mlp.down_proj"]}
    adapted, _ = tiny_target("qwen3_moe", bits=4)
    adapted.freeze()
    linear_to_lora_layers(adapted, 3, settings)
    lora = {k: mx.random.normal(v.shape, key=mx.random.key(i)) for i, (k, v) in enumerate(tree_flatten(adapted.trainable_parameters()))}
    (tmp_path / "adapter_config.json").write_text(json.dumps({"num_layers": 3, "lora_parameters": settings}))
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), lora)
    both = [load(folders[0], adapter_path=str(tmp_path), **options)[0] for options in ({}, dict(expert_offload=folders[1], expert_budget="30%"))]
    assert isinstance(both[1], nn.Module) and same(run(both[1]), run(both[0]))
    assert of(both[1]).counters["decode"].misses > 0


def test_off_means_off(folders):
    import subprocess
    import sys
    code = "import sys, mlx_spark; m, t = mlx_spark.load(sys.argv[1]); print(any(n in sys.modules for n in ('mlx_spark.offload', 'mlx_spark.mmap_gather', 'mlx_spark.expert_file')))"
    assert subprocess.run([sys.executable, "-c", code, folders[0]], capture_output=True, text=True).stdout.strip() == "False"


READERS = {"raises": lambda: 1 / 0, "nonsense": lambda: "short", "nothing": lambda: Pressure(), "starved": lambda: Pressure(0, 1 << 30, 100.), "negative": lambda: Pressure(-5, 1, 0.)}


@pytest.mark.parametrize("how", READERS)
def test_the_governor_never_stops_a_run(packed, wanted, how, monkeypatch):
    clock = iter(range(0, 10**6, 5))
    monkeypatch.setattr("mlx_spark.offload.time.monotonic", lambda: next(clock))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, offload = on_disk(packed, budget="90%", governor=READERS[how])
        assert same(run(model), wanted["qwen3_moe"])
    cycle = sum(offload.expert_bytes.values()) * 2
    assert offload.budget_bytes == (cycle if how in ("starved", "negative") else offload.asked_bytes)
    assert (offload.governor_error is not None) == (how in ("raises", "nonsense"))


def test_memory_given_back_under_pressure_returns_when_it_is_over(packed, wanted, monkeypatch):
    clock, state = iter(range(0, 10**6, 5)), [Pressure(stalled_pct=60.)]
    monkeypatch.setattr("mlx_spark.offload.time.monotonic", lambda: next(clock))
    model, offload = on_disk(packed, budget="100%", governor=lambda: state[0])
    offload.loader.join()
    assert same(run(model), wanted["qwen3_moe"])
    low = offload.budget_bytes
    assert low < .3 * offload.pool_bytes and not offload.fits and offload.mapped.resident_bytes() <= low
    state[0] = Pressure(stalled_pct=0.)
    assert same(run(model), wanted["qwen3_moe"])
    assert offload.budget_bytes == offload.pool_bytes
    offload.loader.join()
    assert set(offload.fits) == {0, 1, 2, 3}
    offload.detach()


def test_warming_in_another_thread(packed, wanted):
    model, offload = on_disk(packed, budget="60%")
    keys, stop = [(layer, e) for layer in range(4) for e in range(8)], threading.Event()
    def warm():
        rng = random.Random(0)
        while not stop.is_set(): offload.warm(rng.sample(keys, 9), threads=2, piece=4)
    thread = threading.Thread(target=warm)
    thread.start()
    try:
        for _ in range(3): assert same(run(model), wanted["qwen3_moe"])
    finally:
        stop.set()
        thread.join()
    assert offload.policy.used_bytes <= offload.budget_bytes
    assert {key for key in keys if key in offload.policy} == offload.resident


def test_warming_more_than_fits_keeps_the_last(packed):
    model, offload = on_disk(packed, budget="50%")
    offload.warm([(layer, e) for layer in range(4) for e in range(8)])
    assert offload.mapped.resident_bytes() == offload.budget_bytes == 16 * offload.expert_bytes[0]
    assert offload.resident == {(layer, e) for layer in (2, 3) for e in range(8)}


def test_a_policy_that_cannot_live_below_the_cycle_is_replaced_on_the_way(packed, wanted):
    model, offload = on_disk(packed, budget="50%")
    assert same(run(model), wanted["qwen3_moe"]) and offload.policy_name == "lru"
    with pytest.warns(UserWarning, match="layerlfu-strict instead"): offload.set_budget("10%")
    assert offload.policy_name == "layerlfu-strict" and offload.mapped.resident_bytes() <= offload.budget_bytes
    assert same(run(model), wanted["qwen3_moe"])


def test_an_own_policy_and_its_own_budget(packed, wanted):
    model, offload = on_disk(packed, budget="50%", policy=LRU(10**9, {layer: 18 * 4096 for layer in range(4)}))
    assert same(run(model), wanted["qwen3_moe"])
    assert offload.policy_name == "LRU" and offload.policy.used_bytes <= offload.budget_bytes


def test_lazily_dropped_passes_do_no_harm(packed, wanted):
    "A forward pass that nobody evaluates leaves ids behind; they are looked at when somebody counts."
    model, offload = on_disk(packed, budget="100%")
    offload.loader.join()
    for _ in range(3): model(mx.array([[1, 2, 3]]))
    assert offload.counters["decode"].passes == 3
    assert same(run(model), wanted["qwen3_moe"])


def test_budget_words():
    assert budget_in_bytes("12.5%", 1 << 33) == 1 << 30 and budget_in_bytes(" 3 GiB ", 1 << 40) == 3 << 30
