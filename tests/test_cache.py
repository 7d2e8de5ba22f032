"""Rewinding, over random histories: every kind of cache alone, and every kind of model whose cache mlx-lm can make."""
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mlx_spark  # noqa: F401  (BLAS first)
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as mlx_cache

from mlx_spark.cache import FIELDS, Rewinder, cache_offset, check_cache, leaves

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
        if isinstance(keys, (tuple, list)): keys, values = (mx.dequantize(*a, group_size=c.group_size, bits=c.bits) for a in (keys, values))
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
    size, keep = {"RotatingKVCache": (8, 0), "RotatingKVCache keep": (9, 4), "RotatingKVCache 2": (2, 0)}.get(kind, (10 ** 6, 0))
    return [q for q in range(p + 1) if q < keep or q > p - (size - keep) or p < size]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(prompt=st.integers(0, 20), one_pass=st.booleans(), history=HISTORY)
def test_any_history_of_commits_shows_what_single_steps_would(kind, prompt, one_pass, history):
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
