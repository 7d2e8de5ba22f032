"""Rewinding, over random histories: every kind of cache alone, then models of every kind that mlx-lm has caches for."""
import inspect
from contextlib import contextmanager
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mlx_spark  # noqa: F401  (BLAS first)
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models import cache as mlx_cache

from mlx_spark.cache import FIELDS, Rewinder, _WatchedRing, cache_offset, check_cache, leaves, make_cache
from mlx_spark.taps import Taps
from mlx_spark.targets import TINY_FAMILIES, tiny_target

ROUND = st.lists(st.integers(1, 6), min_size=1, max_size=4)          # tokens of each pass under one mark
HISTORY = st.lists(st.tuples(ROUND, st.floats(0, 1)), min_size=1, max_size=8)
IDLE = nn.Linear(1, 1)


class Tape:
    "A cache fed with positions: the key of token p is p, its value -p, so what a mask leaves visible can be read off."
    def __init__(self, cache): self.cache = cache

    def feed(self, positions, window=None):
        "For each position, fed in one pass: the sorted positions it sees."
        c, n = self.cache, len(positions)
        if hasattr(c, "maybe_trim_front"): c.maybe_trim_front()
        start = getattr(c, "start_position", 0)
        mask = c.make_mask(n, return_array=n > 1, window_size=window) if hasattr(c, "make_mask") else chunk_mask(c, n)
        x = mx.array(list(positions), dtype=mx.float32).reshape(1, 1, n, 1) * mx.ones((1, 1, 1, 64))
        keys, values = c.update_and_fetch(x, -x)
        if hasattr(c, "bits"):
            keys, values = (mx.dequantize(*a, group_size=c.group_size, bits=c.bits) for a in (keys, values))
        keys, values = np.array(keys[0, 0, :, 0]), np.array(values[0, 0, :, 0])
        assert np.array_equal(keys, -values) and start >= 0
        mask = np.ones((n, len(keys)), bool) if mask is None else np.array(mask).reshape(n, -1)
        return [sorted(keys[row].astype(int).tolist()) for row in mask]


def chunk_mask(c, n):
    "What llama4 builds for a chunked cache: causal, and within the chunk of `chunk_size` positions."
    rows, columns = np.arange(c.offset, c.offset + n)[:, None], np.arange(c.start_position, c.offset + n)
    return mx.array((columns <= rows) & (columns // c.chunk_size == rows // c.chunk_size))


KINDS = {
    "KVCache": lambda: mlx_cache.KVCache(),
    "QuantizedKVCache": lambda: mlx_cache.QuantizedKVCache(group_size=64, bits=8),
    "ConcatenateKVCache": lambda: mlx_cache.ConcatenateKVCache(),
    "ChunkedKVCache": lambda: mlx_cache.ChunkedKVCache(8),
    "RotatingKVCache": lambda: mlx_cache.RotatingKVCache(max_size=8),
    "RotatingKVCache keep": lambda: mlx_cache.RotatingKVCache(max_size=9, keep=4),
    "RotatingKVCache 2": lambda: mlx_cache.RotatingKVCache(max_size=2),
}


def should_see(kind, p):
    "The positions that token p sees when tokens come one by one."
    if kind == "ChunkedKVCache": return list(range(p // 8 * 8, p + 1))
    rings = {"RotatingKVCache": (8, 0), "RotatingKVCache keep": (9, 4), "RotatingKVCache 2": (2, 0)}
    size, keep = rings.get(kind, (10 ** 6, 0))
    return [q for q in range(p + 1) if q < keep or q > p - (size - keep) or p < size]


@contextmanager
def buffers_that_grow_by(step):
    "Let mlx-lm's caches allocate `step` entries at a time, so that short histories cross the edges of their buffers."
    kinds = [k for k in FIELDS if hasattr(k, "step")]
    before = [k.step for k in kinds]
    for k in kinds: k.step = step
    try: yield
    finally:
        for k, n in zip(kinds, before): k.step = n


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(prompt=st.integers(0, 20), one_pass=st.booleans(), history=HISTORY, step=st.sampled_from([256, 3]))
def test_any_history_of_commits_shows_what_single_steps_would(kind, prompt, one_pass, history, step):
    with buffers_that_grow_by(step): run_history(kind, prompt, one_pass, history)


def run_history(kind, prompt, one_pass, history):
    tape = Tape(KINDS[kind]())
    for cut in ([prompt] if one_pass and "keep" not in kind else [1] * prompt):
        if cut: tape.feed(range(tape.cache.offset, tape.cache.offset + cut))
    rewinder, length, longest = Rewinder(IDLE, [tape.cache]), prompt, max(sum(passes) for passes, _ in history)
    for passes, share in history:
        rewinder.mark()
        for n in passes:
            seen = tape.feed(range(tape.cache.offset, tape.cache.offset + n))
            assert seen == [should_see(kind, p) for p in range(tape.cache.offset - n, tape.cache.offset)]
        n = round(share * sum(passes))
        rewinder.commit(n)
        length += n
        assert tape.cache.offset == length
        assert type(tape.cache) in FIELDS and set(vars(tape.cache)) == set(vars(KINDS[kind]()))
        if "Rotating" in kind and tape.cache.keys is not None:
            assert tape.cache.keys.shape[2] <= max(tape.cache.max_size - 1 + longest, prompt)
    assert tape.feed([length]) == [should_see(kind, length)]


@pytest.mark.parametrize("kind", KINDS)
def test_commit_0_before_anything_was_fed_leaves_an_empty_cache(kind):
    tape = Tape(KINDS[kind]())
    with Rewinder(IDLE, [tape.cache]) as rewinder:
        for n in (1, 5):
            rewinder.mark()
            tape.feed(range(n))
            rewinder.commit(0)
            assert tape.cache.empty() and vars(tape.cache) == vars(KINDS[kind]())


def test_commit_0_of_a_single_step_restores_all_of_a_ring_but_its_dead_slot():
    for n_before in range(8, 17):
        tape = Tape(mlx_cache.RotatingKVCache(max_size=8))
        for p in range(n_before): tape.feed([p])
        before, keys = (tape.cache.offset, tape.cache._idx), np.array(tape.cache.keys)[0, 0, :, 0]
        rewinder = Rewinder(IDLE, [tape.cache])
        rewinder.mark()
        tape.feed([999])
        rewinder.commit(0)
        changed = keys[keys != np.array(tape.cache.keys)[0, 0, :, 0]]
        assert (tape.cache.offset, tape.cache._idx) == before and changed.tolist() == [n_before - 8]
        assert not tape.cache.empty()


# mlx-lm's own trim, where it is wrong

def test_mlx_lm_trim_goes_wrong_where_the_rewinder_does_not():
    "Six tokens committed, four fed, one of them kept: past the window and on concatenated arrays mlx-lm cannot do it."
    for kind in ("RotatingKVCache", "ConcatenateKVCache"):
        tape = Tape(KINDS[kind]())
        for p in range(9): tape.feed([p])
        tape.feed(range(9, 13))
        tape.cache.trim(3)
        assert tape.feed([10]) != [should_see(kind, 10)]
    assert not mlx_cache.can_trim_prompt_cache([mlx_cache.ArraysCache(1)])
    ring = mlx_cache.RotatingKVCache(max_size=8)
    ring.offset = 8
    assert mlx_cache.trim_prompt_cache([ring], 3) == 0


# what is read and written of mlx-lm's objects

def fresh(kind):
    return kind(8) if kind in (mlx_cache.ChunkedKVCache, mlx_cache.RotatingKVCache, mlx_cache.ArraysCache) else kind()


@pytest.mark.parametrize("kind", FIELDS, ids=lambda k: k.__name__)
def test_contract_with_mlx_lm(kind):
    "A field that is new, gone or renamed in mlx-lm is named here before it can go wrong silently."
    ours, theirs = set(FIELDS[kind]), set(vars(fresh(kind)))
    assert ours - theirs == set(), f"{kind.__name__} lost {ours - theirs}"
    assert theirs - ours == set(), f"{kind.__name__} gained {theirs - ours}: must commit() restore it?"
    for field in FIELDS[kind]:
        c = fresh(kind)
        delattr(c, field)
        with pytest.raises(ValueError, match=f"no {field} in {kind.__name__}"): check_cache(c)


def test_contract_of_the_mask():
    ours, theirs = (inspect.signature(c.make_mask).parameters.keys() for c in (_WatchedRing, mlx_cache.RotatingKVCache))
    assert ours == theirs


# models

SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, rms_norm_eps=1e-5, rope_theta=1e4, max_position_embeddings=1024)
OTHERS = {   # mlx-lm models beyond the six, for the caches they make
    "falcon_h1": dict(
        SMALL, head_dim=16, mamba_d_conv=4, mamba_d_head=16, mamba_d_ssm=32, mamba_d_state=8, mamba_n_heads=2),
    "lfm2": dict(
        SMALL, norm_eps=1e-5, conv_bias=False, conv_L_cache=3, block_dim=32, block_multiple_of=8,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False, block_ff_dim=32, full_attn_idxs=[1]),
    "mamba": dict(SMALL, state_size=8, conv_kernel=4, use_bias=False, use_conv_bias=True, time_step_rank=4),
    "recurrent_gemma": dict(
        SMALL, attention_bias=False, conv1d_width=4, logits_soft_cap=30.0, attention_window_size=8,
        block_types=["recurrent", "attention"], num_hidden_layers=4),
    "jamba": dict(
        SMALL, attn_layer_offset=1, attn_layer_period=2, expert_layer_offset=1, expert_layer_period=2, mamba_d_conv=4,
        mamba_d_state=8, mamba_expand=1, num_experts=2, num_experts_per_tok=1),
    "longcat_flash_ngram": dict(
        SMALL, ffn_hidden_size=32, moe_topk=2, expert_ffn_hidden_size=16, n_routed_experts=4,
        zero_expert_num=1, num_layers=2,
        kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        routed_scaling_factor=1.0,
        mla_scale_q_lora=True, mla_scale_kv_lora=True, ngram_vocab_size_ratio=2, emb_neighbor_num=3, emb_split_num=2),
    "olmo3": dict(
        SMALL, sliding_window=8, layer_types=["sliding_attention", "full_attention"], head_dim=16, attention_bias=False,
        tie_word_embeddings=True),
    "baichuan_m1": dict(SMALL, sliding_window=8, sliding_window_layers=[0], conv_window=2),
    "llama4": dict(text_config=dict(
        SMALL, attention_bias=False, attention_chunk_size=8, head_dim=16, interleave_moe_layer_step=2,
        intermediate_size_mlp=32,
        model_type="llama4_text", num_experts_per_tok=1, num_hidden_layers=4, num_local_experts=2, rope_scaling=None,
        use_qk_norm=True)),
}


def build(name):
    "A small random model of an mlx-lm class."
    module = import_module(f"mlx_lm.models.{name}")
    model, rng = module.Model(module.ModelArgs.from_dict(OTHERS[name] | {"model_type": name})), np.random.default_rng(0)
    def draw(path, shape):
        noise = rng.standard_normal(shape)
        if "norm" in path: return 1 + .1 * noise
        return .3 * noise if len(shape) == 1 else noise * 1.5 / shape[-1] ** .5
    shapes = sorted((path, p.shape) for path, p in tree_flatten(model.parameters()))
    model.load_weights([(path, mx.array(draw(path, shape).astype(np.float32))) for path, shape in shapes])
    model.eval()
    return model


def run_rounds(model, seed, *, rounds=8, prompt=7, B=1, junk=0, kv_bits=None, max_kv_size=None, passes=1):
    "Random verify passes and commits: logits of the committed rows, and those of single steps over these alone."
    rng, noise = np.random.default_rng(seed), np.random.default_rng(junk)
    cache, plain = make_cache(model, max_kv_size=max_kv_size), make_cache(model, max_kv_size=max_kv_size)
    first, got, want = mx.array(rng.integers(0, 64, (B, prompt))), [], []
    model(first, cache), model(first, plain)
    with Rewinder(model, cache) as rewinder:
        for _ in range(rounds):
            if kv_bits: maybe_quantize_kv_cache(cache, 9, 32, kv_bits), maybe_quantize_kv_cache(plain, 9, 32, kv_bits)
            T = int(rng.integers(1, 7))
            n = int(rng.integers(0, T + 1))
            tokens = rng.integers(0, 64, (B, T))
            tokens[:, n:] = noise.integers(0, 64, (B, T - n))      # what is rejected
            rewinder.mark()
            parts = np.array_split(tokens, min(passes, T), axis=1)
            got.append(mx.concatenate([model(mx.array(part), cache) for part in parts], axis=1)[:, :n])
            rewinder.commit(n)
            want += [model(mx.array(tokens[:, i:i + 1]), plain) for i in range(n)]
    return mx.concatenate(got, axis=1), mx.concatenate(want, axis=1)


CASES = {
    **{f: (lambda f=f: tiny_target(f)[0], {}) for f in TINY_FAMILIES},
    **{f"{f} 4-bit": (lambda f=f: tiny_target(f, bits=4)[0], {}) for f in ("gemma4", "qwen3_next")},
    **{f"{f}, {what}": (lambda f=f: tiny_target(f)[0], how) for what, how, families in [
        ("three rows", dict(B=3, prompt=14), ("gemma3", "qwen3_moe", "qwen3_next")),
        ("quantized KV", dict(kv_bits=8), ("llama", "qwen3_moe", "qwen3_next")),
        ("max_kv_size", dict(max_kv_size=9), ("qwen3", "qwen3_moe")),
        ("several passes", dict(passes=3, prompt=14), ("gemma4", "qwen3_next")),
    ] for f in families},
    "gemma4 prompt past the window": (lambda: tiny_target("gemma4")[0], dict(prompt=40)),
    **{name: (lambda name=name: build(name), {}) for name in OTHERS if name != "baichuan_m1"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_committed_rows_are_plain_decoding_and_rejected_ones_leave_no_trace(case, seed):
    make, how = CASES[case]
    model = make()
    classes = [type(m) for _, m in model.named_modules()]
    got, want = run_rounds(model, seed, **how)
    again, _ = run_rounds(model, seed, junk=1, **how)
    spread = mx.abs(want - want.mean(axis=-1, keepdims=True)).max().item()
    assert spread > 1e-2 and mx.abs(got - want).max().item() < 1e-4 * spread   # other shapes round otherwise
    assert mx.array_equal(got, again)                                         # bit for bit, whatever was rejected
    assert [type(m) for _, m in model.named_modules()] == classes


@pytest.mark.parametrize("taps_first", [True, False])
def test_taps_and_rewinder_listen_to_the_same_layers(taps_first):
    "Both hear qwen3_next's decoder layers; a replay must not overwrite what was tapped, and either may leave first."
    model, _ = tiny_target("qwen3_next")
    classes, tokens = [type(m) for m in model.modules()], mx.array([[3, 1, 4, 1, 5]])
    with Taps(model, (-1, 0, 3)) as alone:
        model(tokens, make_cache(model))
        want = alone.take(slice(0, 2))
    cache, taps = make_cache(model), Taps(model, (-1, 0, 3))
    if taps_first: taps.install()
    rewinder = Rewinder(model, cache)
    if not taps_first: taps.install()
    rewinder.mark()
    model(tokens, cache)
    rewinder.commit(2)
    assert mx.array_equal(taps.take(slice(0, 2)), want)
    first, last = (taps.remove, rewinder.close) if taps_first else (rewinder.close, taps.remove)
    first()
    model(tokens, cache)
    last()
    assert [type(m) for m in model.modules()] == classes and cache_offset(cache) == 7


def test_a_module_that_hides_its_recurrent_cache_is_named():
    "baichuan_m1 hands its attention a CacheList with recurrent states in it: the first commit refuses."
    model = build("baichuan_m1")
    cache = make_cache(model)
    with Rewinder(model, cache) as rewinder:
        rewinder.mark()
        model(mx.array([[1, 2, 3]]), cache)
        with pytest.raises(RuntimeError, match="ArraysCache at 0 changed"): rewinder.commit(2)
    assert cache_offset(cache) == 0 and cache[0][0][0] is None          # closing went back to the mark


# cost

@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_round_looks_at_no_data(family):
    "Inside a trace every array is a placeholder: reading one would raise."
    model, _ = tiny_target(family)
    cache = make_cache(model)
    model(mx.array([[1] * 20]), cache)
    rewinder = Rewinder(model, cache)

    def round_(tokens):
        rewinder.mark()
        logits = model(tokens, cache)
        rewinder.commit(2)
        return logits
    assert mx.compile(round_)(mx.array([[1, 2, 3, 4]])).shape == (1, 4, 288)
    assert cache_offset(cache[1:]) == 22
    rewinder.close()


@pytest.mark.parametrize("kind, n_new, n_kept", [
    ("KVCache", 4, 2), ("KVCache", 1, 1), ("RotatingKVCache", 1, 1), ("RotatingKVCache", 1, 0), ("handle", 1, 1)])
def test_a_round_copies_no_buffer(kind, n_new, n_kept):
    "Memory at its peak during a round; the last case holds a handle, to show that a copy would be seen."
    cache = mlx_cache.KVCache() if kind == "KVCache" else mlx_cache.RotatingKVCache(max_size=2048)
    draw = lambda n: mx.random.normal((1, 8, n, 64))
    for n in (1500, 1500, 1, 1):
        mx.eval(cache.update_and_fetch(draw(n), draw(n)))
    rewinder, new = Rewinder(IDLE, [cache]), draw(n_new)
    mx.eval(new, cache.keys, cache.values)
    handle = cache.keys[...] if kind == "handle" else None
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    rewinder.mark()
    mx.eval(cache.update_and_fetch(new, new))
    rewinder.commit(n_kept)
    mx.eval(cache.keys, cache.values)
    grown = mx.get_peak_memory() - before
    del handle
    assert (grown > cache.keys.nbytes / 2) == (kind == "handle"), grown
