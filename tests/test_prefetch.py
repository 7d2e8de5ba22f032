"""A hint changes no token; pinned routing reaches the routers of every family it accepts and names those it refuses."""
import threading
import warnings

import mlx_spark  # noqa: F401  (preloads BLAS before mlx)
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from test_expert_trace import FAMILIES, K, V, build

from mlx_spark import prefetch
from mlx_spark.expert_file import pack_experts
from mlx_spark.expert_trace import moe_modules, n_experts
from mlx_spark.mmap_gather import load_offloaded
from mlx_spark.offload import attach
from mlx_spark.prefetch import Pins, Profile, Watch, load_profile, model_id_of, pinned_kl, profile_path, save_profile
from mlx_spark.targets import save_tiny, tiny_target

REFUSED = {"deepseek_v2": "neither a linear router nor a correction"}


def tokens(n=24, seed=0): return mx.array(np.random.default_rng(seed).integers(0, V, (1, n)))

def hot_keys(model, n, seed=0):
    rng = np.random.default_rng(seed)
    return [(layer, int(e)) for layer, m in moe_modules(model).items() for e in rng.permutation(n_experts(m))[:n]]

# --- pinned routing --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(REFUSED)))
@pytest.mark.parametrize("bits", [None, 4])
def test_pinned_routing_stays_among_the_warm_experts(family, bits):
    model = build(family, bits=bits)
    plain = model(tokens())
    keys = hot_keys(model, 6 if family in ("deepseek_v3", "glm4_moe", "dots1", "nemotron_h") else 4)   # group-limited ones: enough in every group
    seen = []
    with Pins(model, keys), Watch(model, lambda layer, ids: seen.append((layer, ids))): pinned = model(tokens())
    assert {(layer, e) for layer, ids in seen for e in ids.ravel().tolist()} <= set(keys)
    assert not mx.array_equal(pinned, plain), "nothing was restricted"
    assert mx.isfinite(pinned).all()
    assert mx.array_equal(model(tokens()), plain)
    everything = [(layer, e) for layer, m in moe_modules(model).items() for e in range(n_experts(m))]
    with Pins(model, everything): assert mx.array_equal(model(tokens()), plain)

@pytest.mark.parametrize("family", sorted(REFUSED))
def test_families_without_a_handle_are_refused_by_name(family):
    model = build(family)
    with pytest.raises(ValueError, match=family) as e: Pins(model, hot_keys(model, 4))
    assert REFUSED[family] in str(e.value)

def test_restriction_comes_before_the_choice():
    "qwen3_moe by hand: the best two of the warm experts, their softmax renormalized over those two."
    model = build("qwen3_moe")
    block = model.layers[0].mlp
    warm = [0, 3, 5, 6]
    x = mx.array(np.random.default_rng(1).standard_normal((1, 7, 64)), mx.float32)
    logits = np.array(block.gate(x))[0]
    cold = np.setdiff1d(np.arange(8), warm)
    logits[:, cold] = -np.inf
    ids = np.argsort(-logits, -1)[:, :K]
    w = np.exp(np.take_along_axis(logits, ids, -1))
    w /= w.sum(-1, keepdims=True)
    want = (np.array(block.switch_mlp(x, mx.array(ids[None]))) * w[None, :, :, None]).sum(-2)
    with Pins(model, [(layer, e) for layer in moe_modules(model) for e in warm]): got = np.array(block(x))
    assert np.allclose(got, want, atol=1e-5)

def test_too_few_warm_experts_are_noticed():
    model = build("qwen3_moe")
    with pytest.raises(ValueError, match="1 warm experts, each token takes 2"): pinned_kl(model, hot_keys(model, 1), [[1, 2, 3, 4]])
    assert mx.array_equal(model(tokens()), build("qwen3_moe")(tokens()))   # and the model is whole again

def test_group_limits_that_pinning_cannot_reach_are_noticed():
    "One warm expert in each of two groups, of which one is permitted: the second choice falls on a score of 0 in the other group, whoever that is."
    model = build("deepseek_v3")
    layers = moe_modules(model)
    keys = [(layer, e) for layer in layers for e in (1, 6)]
    with pytest.raises(ValueError, match="deepseek_v3.*limits the choice"): pinned_kl(model, keys, [tokens()[0].tolist()])

# --- hints -----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    root = tmp_path_factory.mktemp("prefetch")
    folder = save_tiny(root / "moe", "qwen3_moe", bits=4)
    pack_experts(folder, root / "experts", progress=False)
    return folder, root / "experts"

def offloaded(packed, budget, **options):
    model, tokenizer, mapped = load_offloaded(str(packed[0]), packed[1])
    return model, tokenizer, attach(model, mapped, budget=budget, governor=False, **options)

def greedy(model, prompt, n=16):
    cache, out, feed = make_prompt_cache(model), [], mx.array(prompt)[None]
    for _ in range(n):
        feed = model(feed, cache=cache)[:, -1:].argmax(-1)
        out.append(feed.item())
    return out

PROMPT = list(b"def f(x): return")

@pytest.mark.parametrize("budget", ["0%", "12.5%", "50%", "100%"])
def test_no_hint_right_hint_wrong_hint_same_tokens(packed, budget, tmp_path):
    want = greedy(tiny_target("qwen3_moe", bits=4)[0], PROMPT)
    model, _, offload = offloaded(packed, budget)
    wrong = Profile(model_id_of(offload), "wrong", offload.n_experts)
    used = set()
    with Watch(model, lambda layer, ids: used.update((layer, e) for e in ids.ravel().tolist())): assert greedy(model, PROMPT) == want
    for layer, n in offload.n_experts.items(): wrong.observe(layer, [e for e in range(n) if (layer, e) not in used] or [0])
    save_profile(wrong, tmp_path)
    for name in ("new", "new", "wrong"):
        with prefetch.domain(offload, name, folder=tmp_path) as d:
            if d.warming and name == "wrong": d.warming.wait()
            assert greedy(model, PROMPT) == want
    offload.detach()

def test_warming_while_decoding_changes_nothing(packed, tmp_path):
    want = greedy(tiny_target("qwen3_moe", bits=4)[0], PROMPT, 40)
    model, _, offload = offloaded(packed, "25%")
    p = Profile(model_id_of(offload), "all", offload.n_experts)
    for layer, n in offload.n_experts.items(): p.observe(layer, list(range(n)))
    stop, errors = threading.Event(), []
    def again():
        while not stop.is_set():
            w = prefetch.warm(offload, p)
            w.wait()
            if w.error: errors.append(w.error)
    thread = threading.Thread(target=again)
    thread.start()
    try: assert greedy(model, PROMPT, 40) == want
    finally:
        stop.set()
        thread.join()
    assert not errors
    offload.detach()

def test_warmed_domain_misses_less(packed, tmp_path):
    misses = {}
    for name in (None, "code"):
        model, _, offload = offloaded(packed, "60%")
        with prefetch.domain(offload, "code", folder=tmp_path): greedy(model, PROMPT)      # learn
        offload.detach()
        model, _, offload = offloaded(packed, "60%")
        with prefetch.domain(offload, name, folder=tmp_path, learn=False) as d:
            if d: d.warming.wait()
            greedy(model, PROMPT)
        misses[name] = sum(c.misses for c in offload.counters.values())
        offload.detach()
    assert misses["code"] < misses[None]

def test_profiles_of_other_models_are_refused_and_generation_goes_on(packed, tmp_path):
    model, _, offload = offloaded(packed, "50%")
    other = Profile(model_id_of(offload), "coding", {0: 16})
    other.observe(0, [1, 2])
    path = save_profile(other, tmp_path)
    with pytest.raises(ValueError, match=r"\{0: 16\}, wanted \{0: 8"): load_profile(other.model_id, "coding", offload.n_experts, tmp_path)
    before = path.read_bytes()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with prefetch.domain(offload, "coding", folder=tmp_path): assert greedy(model, PROMPT) == greedy(tiny_target("qwen3_moe", bits=4)[0], PROMPT)
    assert any("is not used" in str(w.message) for w in said) and path.read_bytes() == before
    offload.detach()

def test_profile_names_cannot_leave_their_folder(tmp_path):
    for name in ("../x", "a/b", "", ".hidden", "x" * 65, None):
        with pytest.raises(ValueError, match="a domain is named"): profile_path("m", name, tmp_path)
    assert profile_path("owner/model@12/../..", "x", tmp_path).parent.parent == tmp_path
    assert profile_path("..", "x", tmp_path).resolve().is_relative_to(tmp_path.resolve())

def test_decay_forgets_a_task_that_is_over():
    p = Profile("m", "x", {0: 16}, half_life=50.)
    for _ in range(200): p.observe(0, [0, 1])
    for _ in range(200): p.observe(0, [8, 9])
    assert p.hot(2, {0: 1}) == [(0, 8), (0, 9)] and p.counts[0, 0] < p.counts[0, 8] / 10
