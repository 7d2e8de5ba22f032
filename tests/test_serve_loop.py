"Requests that come and go: every one gets what it would get alone."
import copy
import threading
import warnings
from functools import lru_cache
from types import SimpleNamespace

import mlx_spark  # noqa: F401  (loads a BLAS before MLX)
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mlx_spark import attention, ragged, serve_loop
from mlx_spark.dspark import DSparkConfig, DSparkDrafter, DSparkSource
from mlx_spark.generate import compare_ids, stream_generate
from mlx_spark.ragged import RaggedCache, Round, grouped, packing_error
from mlx_spark.scheduler import Costs
from mlx_spark.serve_loop import BatchCosts, BatchPlanner, Request, ServeLoop, batch_generate
from mlx_spark.sources import Draft, PromptLookup
from mlx_spark.taps import Taps
from mlx_spark.targets import TINY_EOS, parts, tiny_target
from mlx_spark.verify import Sampling, target_probs

PACKED = ("llama", "qwen3", "gemma3", "gemma4", "qwen3_moe")
NO_STOP = frozenset()


@pytest.fixture(autouse=True)
def costs_elsewhere(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("MLX_SPARK_CACHE", str(tmp_path_factory.getbasetemp() / "costs"))


@lru_cache
def tiny(family="llama", seed=0): return tiny_target(family, seed=seed)


@lru_cache
def drafter(family="llama"):
    mx.random.seed(3)
    model = tiny(family)[0]
    d = parts(model).dims
    config = DSparkConfig(
        variant="qwen3", vocab_size=d.vocab_size, hidden_size=d.hidden_size, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, rms_norm_eps=1e-6, rope_theta=1e4, block_size=4,
        mask_token_id=270, target_layer_ids=(0, 2), num_target_layers=d.n_layers, markov_rank=8, markov_head_type="vanilla",
        enable_confidence_head=True, confidence_head_with_markov=True)
    return DSparkDrafter(config).bind(model)


class Often(PromptLookup):
    "Drafts that are right four times in five: the target's own greedy answer, spoilt here and there."
    name = "often"
    def __init__(self, answers, max_draft=4):
        super().__init__(max_draft=max_draft)
        self.answers = answers   # full ids of each conversation

    def propose(self, anchor, n, *, key=None, want_probs=False, want_confidence=False):
        found = []
        for row, token in zip(self.rows, anchor):
            text = [*row.tokens, int(token)]
            rest = next((a[len(text):len(text) + n] for a in self.answers if a[:len(text)] == text), [])
            found.append([(t + 1) % 256 if (t * 7919 + (len(text) + i) * 104729) % 101 < 20 else t for i, t in enumerate(rest)])
        tokens = mx.array([row + [0] * (n - len(row)) for row in found], dtype=mx.uint32)
        return Draft(tokens, lengths=[len(row) for row in found])


def prompt_of(i, n): return np.random.default_rng([i, n]).integers(0, 256, n).tolist()


@lru_cache(maxsize=None)
def alone(family, prompt, n):
    model, tokenizer = tiny(family)
    return [r.token for r in stream_generate(model, tokenizer, list(prompt), max_tokens=n)]


@lru_cache(maxsize=None)
def drawn_alone(family, prompt, n, law, seed):
    loop = ServeLoop(*tiny(family))
    loop.submit(Request(list(prompt), n, law, seed=seed, id="it"))
    return drain(loop)["it"][0]


def check_alone(family, prompt, ids, n):
    "Greedy ids are those of the single run, or part from them at a tie."
    expected = alone(family, tuple(prompt), n)
    if ids != expected:
        d = compare_ids(tiny(family)[0], mx.array(prompt), expected, ids)
        assert d.tie, (family, d)


def source_of(kind, family, prompts=(), n=40):
    if kind == "often": return Often([list(p) + alone(family, tuple(p), n) for p in prompts])
    return {"none": None, "lookup": PromptLookup(), "model": tiny(family)[0], "dspark": drafter(family)}[kind]


def drain(loop):
    out = {}
    while loop.busy:
        for e in loop.step():
            tokens, text, last = out.get(e.id, ([], "", None))
            assert last is None or last.finish is None, "nothing comes after the last event"
            out[e.id] = (tokens + e.tokens, text + e.text, e)
    return out


# ---- greedy: every request gets its single run ----

@pytest.mark.parametrize("kind", ("none", "lookup", "model", "often", "dspark"))
@pytest.mark.parametrize("family", PACKED)
def test_families(family, kind):
    model, tokenizer = tiny(family)
    prompts, limits = [prompt_of(i, n) for i, n in enumerate((5, 1, 40, 19, 7))], [18, 30, 9, 25, 12]
    r = batch_generate(model, tokenizer, prompts, draft_model=source_of(kind, family, prompts), max_tokens=limits, max_rows=3,
                       prefill_step_size=16, num_draft_tokens=None if kind == "none" else 4)
    for p, ids, n in zip(prompts, r.ids, limits): check_alone(family, p, ids, n)
    if kind in ("model", "often"): assert all(s.tau > 1.3 for s in r.stats), [s.tau for s in r.stats]


actions = st.lists(st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 30), st.integers(1, 14), st.sampled_from([None, 0, 2, 5]),
              st.sampled_from([None, Sampling(temp=1.0), Sampling(temp=.8, top_p=.9)])),
    st.tuples(st.just("step"), st.integers(1, 4)), st.tuples(st.just("cancel"), st.integers(0, 7))), min_size=3, max_size=14)


@pytest.mark.parametrize("n_rows", (1, 3))
@pytest.mark.parametrize("family", PACKED)
def test_attention_of_few_queries(family, n_rows, monkeypatch):
    "The way of a CUDA machine, taken here: the same ids, in `generate` and in the loop."
    entered = []
    def wants(): return entered.append(1) or True
    model, tokenizer = tiny(family)
    prompts = [prompt_of(i, 5 + 60 * i) for i in range(n_rows)]
    for p in prompts: alone(family, tuple(p), 30)
    for module in (attention, ragged): monkeypatch.setattr(module, "wants_few", wants)
    loop = ServeLoop(model, tokenizer, draft_model=source_of("often", family, prompts, 30), num_draft_tokens=4)
    for p in prompts: loop.submit(Request(p, 30, stop_tokens=NO_STOP, id=str(len(p))))
    got = {str(len(p)): [] for p in prompts}
    while loop.busy:
        for e in loop.step(): got[e.id] += e.tokens
    for p in prompts: check_alone(family, p, got[str(len(p))], 30)
    assert sum(loop.counters["accepted"]) > 10
    lookup = [r.token for r in stream_generate(model, tokenizer, prompts[0], max_tokens=30, draft_model=PromptLookup(), num_draft_tokens=3)]
    check_alone(family, prompts[0], lookup, 30)
    assert entered


@pytest.mark.parametrize("kind", ("often", "dspark", "model"))
@given(actions, st.integers(1, 4), st.sampled_from([4, 11, 64]))
@settings(max_examples=12, deadline=None)
def test_schedules(kind, actions, max_rows, step):
    "Whatever joins, leaves or is cancelled, and whenever."
    family = "gemma3" if kind == "often" else "llama"
    prompts = [prompt_of(i, a[1]) for i, a in enumerate(actions) if a[0] == "submit"]
    loop = ServeLoop(*tiny(family), draft_model=source_of(kind, family, prompts, 14), max_rows=max_rows, prefill_step_size=step, num_draft_tokens=4)
    out, sent, gone = {}, [], set()
    def turn():
        for e in loop.step(): out.setdefault(e.id, []).append(e)
        assert loop.running <= max_rows and len(loop.cache.lengths) == loop.running
        assert all(loop.cache.lengths[b] == len(row.tokens) - 1 for b, row in enumerate(loop.rows))
    for i, a in enumerate(actions):
        if a[0] == "submit":
            p = prompts[len(sent)]
            sent.append((p, a[2], loop.submit(Request(p, a[2], a[4], seed=i, num_draft_tokens=a[3], id=str(i))), a[4]))
        elif a[0] == "step":
            for _ in range(a[1]): turn()
        elif a[1] < len(sent) and loop.cancel(sent[a[1]][2]): gone.add(sent[a[1]][2])
    while loop.busy: turn()
    for p, n, id, law in sent:
        events, ids = out[id], sum((e.tokens for e in out[id]), [])
        assert [e.finish is None for e in events] == [True] * (len(events) - 1) + [False]
        assert (events[-1].finish == "cancelled") == (id in gone)
        expected = alone(family, tuple(p), n) if law is None else drawn_alone(family, tuple(p), n, law, int(id))
        if id in gone: ids += expected[len(ids):]
        if law is None: check_alone(family, p, ids, n)
        else: assert ids == expected
    assert not loop.cache.lengths and loop.cache.nbytes == 0 and not loop.ids


def test_first_come_first_served():
    model, tokenizer = tiny()
    loop = ServeLoop(model, tokenizer, max_rows=2, prefill_step_size=8)
    prompts = [prompt_of(i, 3 + 5 * i % 17) for i in range(12)]
    order = [loop.submit(Request(p, 2 + i % 5)) for i, p in enumerate(prompts)]
    started, seen = [], drain_watching(loop, lambda: [row.request.id for row in loop.rows])
    for rows in seen:
        for id in rows:
            if id not in started: started.append(id)
    assert started == order


def drain_watching(loop, look):
    seen = []
    while loop.busy:
        loop.step()
        seen.append(look())
    return seen


def test_alone_in_the_loop_is_bit_for_bit_generate():
    model, tokenizer = tiny("gemma4")
    p = prompt_of(1, 30)
    loop = ServeLoop(model, tokenizer, draft_model=PromptLookup())
    loop.submit(Request(p, 40, n_logprobs=0))
    got = sum((e.logprobs for e in [e for _ in range(200) for e in loop.step()]), [])
    plain = [r.logprobs[r.token].item() for r in stream_generate(model, tokenizer, p, max_tokens=40)]
    np.testing.assert_allclose([x for x, _ in got], plain, atol=2e-4)


# ---- sampling ----

def sampled_ids(prompt, settings_, others=0, source=None, n=16, seed=5, **options):
    model, tokenizer = tiny()
    loop = ServeLoop(model, tokenizer, draft_model=source, max_rows=8, **options)
    for i in range(others): loop.submit(Request(prompt_of(50 + i, 3 + 7 * i), 5 + 3 * i, Sampling(temp=.5 * (i % 3)), id=f"other {i}"))
    loop.submit(Request(prompt, n, settings_, seed=seed, id="it"))
    return drain(loop)["it"][0]


@pytest.mark.parametrize("law", (Sampling(temp=1.0), Sampling(temp=.7, top_p=.9), Sampling(temp=1.3, top_k=12), Sampling(temp=.9, min_p=.05)))
def test_own_random_stream(law):
    "Same seed, same prompt, same tokens: whoever else is there, whatever drafts."
    p = prompt_of(9, 12)
    first = sampled_ids(p, law)
    assert first == sampled_ids(p, law, others=4)
    assert first == sampled_ids(p, law, others=2, source=tiny()[0], num_draft_tokens=3)
    assert first == sampled_ids(p, law, others=3, source=drafter(), num_draft_tokens=4)
    assert first == sampled_ids(p, law, others=3, source=Often([p + first]), num_draft_tokens=4)
    assert first != sampled_ids(p, law, seed=6)


def test_law_of_two_tokens():
    "Answers of many seeds, drafted for, follow the target's law: chi-square over pairs of tokens, 1 % level."
    model, tokenizer = tiny()
    p, law, N = prompt_of(4, 6), Sampling(temp=.8, top_k=4), 600
    loop = ServeLoop(model, tokenizer, draft_model=model, max_rows=32, num_draft_tokens=2)
    for i in range(N): loop.submit(Request(p, 2, law, seed=i, stop_tokens=NO_STOP, id=str(i)))
    pairs = [tuple(ids) for ids, _, _ in drain(loop).values()]
    first = np.array(target_probs(model(mx.array([p]))[0, -1], law), dtype=float)
    expected = {}
    for a in np.flatnonzero(first):
        second = np.array(target_probs(model(mx.array([p + [int(a)]]))[0, -1], law), dtype=float)
        expected |= {(int(a), int(b)): N * first[a] * second[b] for b in np.flatnonzero(second)}
    assert set(pairs) <= set(expected)
    big = {k: v for k, v in expected.items() if v >= 5}
    chi = sum((pairs.count(k) - v) ** 2 / v for k, v in big.items())
    rest = sum(v for k, v in expected.items() if k not in big)
    if rest >= 5: chi += (sum(x not in big for x in pairs) - rest) ** 2 / rest
    dof = len(big) - (rest < 5)
    assert chi < dof + 2.33 * np.sqrt(2 * dof) + 3, (chi, dof)


@pytest.mark.parametrize("law", (Sampling(temp=1.0), Sampling(temp=.7, top_p=.9), Sampling(temp=1.2, top_k=20, min_p=.02)))
@pytest.mark.parametrize("family", ("llama", "gemma4"))
def test_sampled_ids_are_those_of_plain_generate_with_the_seed(family, law):
    model, tokenizer = tiny(family)
    p = prompt_of(2, 9)
    for seed in (0, 7, 2**63):
        plain = [int(r.token) for r in stream_generate(model, tokenizer, p, max_tokens=15, sampler=law, seed=seed)]
        loop = ServeLoop(model, tokenizer, draft_model=model, num_draft_tokens=4, max_rows=4)
        for i in range(3): loop.submit(Request(prompt_of(i, 8), 11, law, seed=i))
        loop.submit(Request(p, 15, law, seed=seed, id="it"))
        assert drain(loop)["it"][0] == plain


# ---- processors, logprobs ----

def penalty(seen):
    "Forbids tokens that were said; keeps what it was shown."
    def process(tokens, logits):
        seen.append(tokens.tolist())
        return mx.put_along_axis(logits, tokens[None], mx.array(-1e9), axis=-1)
    return process


@pytest.mark.parametrize("law", (None, Sampling(temp=.9)))
def test_processors_see_exactly_the_committed_tokens(law):
    model, tokenizer = tiny()
    p, seen, alone_seen = prompt_of(2, 9), [], []
    def run(source, books, others):
        loop = ServeLoop(model, tokenizer, draft_model=source, num_draft_tokens=4, max_rows=4)
        for i in range(others): loop.submit(Request(prompt_of(i, 8), 11))
        loop.submit(Request(p, 15, law, seed=1, processors=[penalty(books)], id="it"))
        return drain(loop)["it"][0]
    plain = run(None, alone_seen, 0)
    ids = run(model, seen, 3)
    assert ids == plain and len(set(ids)) == len(ids)
    assert seen == alone_seen == [p + ids[:i] for i in range(len(ids))]


def test_error_of_one_request():
    model, tokenizer = tiny()
    def breaks(tokens, logits):
        if len(tokens) == 13: raise ZeroDivisionError("too long")
        return logits
    loop = ServeLoop(model, tokenizer, draft_model=model, num_draft_tokens=3)
    good = {loop.submit(Request(p := prompt_of(i, 6), 14)): p for i in range(3)}
    bad = loop.submit(Request(prompt_of(8, 10), 20, processors=[breaks]))
    out = drain(loop)
    ids, _, last = out[bad]
    assert last.finish == "error" and last.error == "ZeroDivisionError: too long" and len(ids) == 3 and last.stats.completion_tokens == 3
    for id, p in good.items(): check_alone("llama", p, out[id][0], 14)


@pytest.mark.parametrize("processed", (False, True))
def test_logprobs(processed):
    model, tokenizer = tiny()
    p = prompt_of(3, 11)
    loop = ServeLoop(model, tokenizer, draft_model=model, num_draft_tokens=3)
    loop.submit(Request(prompt_of(1, 4), 9, n_logprobs=2))
    it = loop.submit(Request(p, 12, n_logprobs=3, processors=[lambda t, x: x * 2] if processed else []))
    events = [e for _ in range(30) for e in loop.step() if e.id == it]
    ids, found = sum((e.tokens for e in events), []), sum((e.logprobs for e in events), [])
    rows = model(mx.array([p + ids]))[0, len(p) - 1:-1] * (2 if processed else 1)
    logprobs = np.array(rows - mx.logsumexp(rows, axis=-1, keepdims=True))
    assert len(found) == len(ids) == 12
    for row, token, (x, best) in zip(logprobs, ids, found):
        assert abs(x - row[token]) < 1e-3 and [t for t, _ in best] == np.argsort(-row)[:3].tolist()
        np.testing.assert_allclose([v for _, v in best], -np.sort(-row)[:3], atol=1e-3)


# ---- ends ----

def say(text): return list(text.encode())


def forced(text):
    "A processor that makes the answer `text`, whatever the model says."
    script, start = say(text), []
    def process(tokens, logits):
        if not start: start.append(len(tokens))
        at = len(tokens) - start[0]
        token = script[at] if at < len(script) else TINY_EOS
        return mx.put_along_axis(mx.full(logits.shape, -1e9), mx.array([[token]]), mx.array(0.0), axis=-1)
    return process


@pytest.mark.parametrize("text, stop, expected, finish, n", [
    ("hello world", ("o w",), "hell", "stop", 7),
    ("hello world", ("lo", "ell"), "h", "stop", 4),
    ("hello world", ("world!",), "hello world", "stop", 12),
    ("aaab", ("aab",), "a", "stop", 4),
    ("grüße", ("ß",), "grü", "stop", 6),
    ("hello", ("xyz",), "hello", "stop", 6)])
def test_stop_strings(text, stop, expected, finish, n):
    model, tokenizer = tiny()
    loop = ServeLoop(model, tokenizer)
    it, seen = loop.submit(Request([1, 2, 3], 30, stop=stop, processors=[forced(text)])), ""
    other = loop.submit(Request([1, 2, 3, 4], 20))
    while loop.busy:
        for e in loop.step():
            if e.id != it: continue
            seen += e.text
            assert expected.startswith(seen), "text that belongs to a stop string was shown"
            if e.finish: assert (e.finish, e.stats.completion_tokens) == (finish, n)
    assert seen == expected and other


def test_stop_tokens_and_max_tokens():
    model, tokenizer = tiny()
    p = prompt_of(0, 5)
    whole = alone("llama", tuple(p), 20)
    at = next(i for i in range(3, 20) if whole[i] not in whole[:i])
    loop = ServeLoop(model, tokenizer, draft_model=model, num_draft_tokens=4)
    a = loop.submit(Request(p, 20, stop_tokens=frozenset([whole[at]])))
    b = loop.submit(Request(p, 7))
    out = drain(loop)
    assert out[a][0] == whole[:at + 1] and out[a][2].finish == "stop"
    assert out[b][0] == whole[:7] and out[b][2].finish == "length"
    loop.submit(Request(p, 20, processors=[forced("hi")], id="eos"))
    ids, text, last = drain(loop)["eos"]
    assert (text, ids[-1], last.finish) == ("hi", TINY_EOS, "stop")
    loop.submit(Request(p, 5, stop_tokens=NO_STOP, processors=[forced("hi")], id="on"))
    assert drain(loop)["on"][0] == [*say("hi"), TINY_EOS, TINY_EOS, TINY_EOS]


# ---- rows ----

def test_cancel_frees_rows_within_a_round():
    loop = ServeLoop(*tiny(), max_rows=3, prefill_step_size=8)
    ids = [loop.submit(Request(prompt_of(i, 6), 50)) for i in range(3)] + [loop.submit(Request(prompt_of(7, 40), 50)), loop.submit(Request([5], 4))]
    for _ in range(4): loop.step()
    assert loop.running == 3 and loop.waiting == 2
    assert loop.cancel(ids[0]) and loop.cancel(ids[4]) and not loop.cancel("nobody")
    events = loop.step()
    assert {e.id for e in events if e.finish == "cancelled"} == {ids[0], ids[4]} and loop.running == 3 and loop.joining is not None
    assert loop.cancel(ids[3])   # while it is prefilled
    loop.step()
    assert loop.running == 2 and len(loop.cache.lengths) == 2
    for id in ids[1:3]: loop.cancel(id)
    loop.step()
    assert not loop.busy and loop.cache.nbytes == 0 and loop.step() == []


def test_a_long_prompt_stalls_nobody():
    loop, sizes = ServeLoop(*tiny(), max_rows=4, prefill_step_size=16), []
    feed = loop.cache.feed
    loop.cache.feed = lambda row, ids, tap=False: (sizes.append(ids.shape[1]), feed(row, ids, tap))[1]
    short = [loop.submit(Request(prompt_of(i, 4), 60)) for i in range(2)]
    loop.step()
    sizes.clear()
    long = loop.submit(Request(prompt_of(9, 200), 3))
    for step in range(12):
        events = loop.step()
        assert {e.id for e in events if e.tokens} == set(short), "everybody gets a token in every step"
    assert sizes == [16] * 12 and loop.joining is not None
    events = loop.step()
    assert long in {e.id for e in events}
    check_alone("llama", prompt_of(9, 200), [t for e in events if e.id == long for t in e.tokens] + drain(loop)[long][0], 3)


def test_many_short_prompts_join_in_one_step():
    loop = ServeLoop(*tiny(), max_rows=8, prefill_step_size=64)
    for i in range(8): loop.submit(Request(prompt_of(i, 9), 5))
    assert len({e.id for e in loop.step()}) == 8
    while loop.busy: loop.step()
    for i in range(8): loop.submit(Request(prompt_of(i, 33), 30, stop_tokens=NO_STOP))
    assert [len({e.id for e in loop.step()}) for _ in range(4)] == [2, 4, 6, 8], "64 prompt tokens a step"


def test_buffer_is_not_copied_in_a_round():
    model, tokenizer = tiny()
    loop = ServeLoop(model, tokenizer, max_rows=8)
    for i in range(8): loop.submit(Request(prompt_of(i, 700), 300, stop_tokens=NO_STOP))
    for _ in range(12): loop.step()
    mx.synchronize()
    layer, now = loop.cache.layers[0].keys.nbytes, mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(3): loop.step()
    assert loop.cache.capacity == 1024
    attention = 8 * 4 * 1024 * 4   # scores of one layer
    assert mx.get_peak_memory() - now < layer / 2 + 8 * attention, (mx.get_peak_memory() - now, layer)


def test_ragged_cache_grows_shrinks_and_moves():
    model, _ = tiny()
    cache, texts = RaggedCache(model), [prompt_of(i, n) for i, n in enumerate((3, 70, 150))]
    for i, text in enumerate(texts):
        cache.add()
        cache.feed(i, mx.array([text]))
        cache.commit(i, len(text))
    assert cache.capacity == 256 and cache.n_rows == 4
    def last_logits(order):
        ids, widths = mx.array([7, 8] * len(order)), [2] * len(order)
        return np.array(cache.feed_rows(ids, widths)[0])[1::2]
    def expected(order): return np.stack([np.array(model(mx.array([texts[i] + [7, 8]]))[0, -1]) for i in order])
    np.testing.assert_allclose(last_logits([0, 1, 2]), expected([0, 1, 2]), atol=2e-4)
    cache.move(1, 0); cache.move(2, 1); cache.drop_last()
    np.testing.assert_allclose(last_logits([1, 2]), expected([1, 2]), atol=2e-4)
    cache.move(1, 0); cache.drop_last(); cache.move(0, 0)
    cache.lengths[0] = 0
    cache.feed(0, mx.array([texts[0]]))
    cache.commit(0, 3)
    assert cache.capacity == 256 or cache.capacity == 64
    np.testing.assert_allclose(np.array(cache.feed(0, mx.array([[7, 8]]))[0])[0, -1:], expected([0]), atol=2e-4)


@pytest.mark.parametrize("family", PACKED)
def test_packing(family): assert packing_error(tiny(family)[0]) < 1e-4


def test_packing_is_undone_and_private():
    model, _ = tiny()
    module = __import__(type(model).__module__, fromlist=["x"])
    plain = module.scaled_dot_product_attention
    with pytest.raises(KeyError), grouped([module], Round([1, 2], [2, 3])): raise KeyError
    assert module.scaled_dot_product_attention is plain
    with grouped([module], Round([1, 2], [2, 3])):
        assert module.scaled_dot_product_attention is not plain
        ids, out = mx.array([[1, 2, 3]]), []
        def other():
            mx.eval(x := model(ids))
            out.append(np.array(x))
        thread = threading.Thread(target=other)
        thread.start(); thread.join()
    np.testing.assert_allclose(out[0], np.array(model(ids)), atol=1e-5)


# ---- targets that can't share rows ----

def test_recurrent_target():
    model, tokenizer = tiny("qwen3_next")
    with pytest.warns(UserWarning, match="qwen3_next decodes row after row and without drafts: a ArraysCache"):
        loop = ServeLoop(model, tokenizer, draft_model=PromptLookup(), max_rows=3)
    prompts = [prompt_of(i, n) for i, n in enumerate((4, 20, 9, 2))]
    ids = [loop.submit(Request(p, 10, keep_state=True)) for p in prompts]
    out = drain(loop)
    for id, p in zip(ids, prompts): check_alone("qwen3_next", p, out[id][0], 10)
    state = out[ids[1]][2].state
    again = loop.submit(Request(p := state.tokens + [3, 4], 8, prompt_state=state))
    out = drain(loop)
    assert out[again][2].stats.cached_tokens == len(state.tokens)
    check_alone("qwen3_next", p, out[again][0], 8)


def test_attention_of_another_kind(monkeypatch):
    model, tokenizer = tiny("qwen3")
    monkeypatch.setattr(ragged, "packing_error", lambda model: 0.4)
    with pytest.warns(UserWarning, match="qwen3 decodes row after row .*off by 0.4"): loop = ServeLoop(model, tokenizer, draft_model=PromptLookup())
    prompts = [prompt_of(i, 5 + i) for i in range(3)]
    ids = [loop.submit(Request(p, 9)) for p in prompts]
    out = drain(loop)
    for id, p in zip(ids, prompts): check_alone("qwen3", p, out[id][0], 9)


def test_offload_runs_one_at_a_time():
    model, tokenizer = tiny_target("llama")
    model._offload = SimpleNamespace(pool_bytes=0, budget_bytes=0)
    with pytest.warns(UserWarning, match="one at a time"): loop = ServeLoop(model, tokenizer)
    assert loop.max_rows == 1


# ---- state for the next turn ----

@pytest.mark.parametrize("kind", ("none", "lookup", "model", "dspark"))
def test_state(kind):
    model, tokenizer = tiny("gemma3")
    loop = ServeLoop(model, tokenizer, draft_model=source_of(kind, "gemma3"), num_draft_tokens=4, max_rows=4)
    p = prompt_of(5, 30)
    for i in range(2): loop.submit(Request(prompt_of(i, 12), 25))
    it = loop.submit(Request(p, 10, keep_state=True))
    ids, _, last = drain(loop)[it]
    state = last.state
    assert state.tokens == (p + ids)[:len(state.tokens)] and len(p + ids) - len(state.tokens) in (0, 1) and state.nbytes > 0
    longer = p + ids + prompt_of(6, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        a = loop.submit(Request(longer, 12, prompt_state=state))
    b, other = loop.submit(Request(longer, 12)), loop.submit(Request(prompt_of(3, 3), 12))
    out = drain(loop)
    check_alone("gemma3", longer, out[a][0], 12)
    assert out[a][0] == out[b][0] and out[a][2].stats.cached_tokens == len(state.tokens) and out[b][2].stats.cached_tokens == 0
    assert out[a][2].stats.accepted_by_position == out[b][2].stats.accepted_by_position, "the source drafts as if it had seen all"
    assert other


def test_state_of_a_prefix():
    model, tokenizer = tiny()
    loop = ServeLoop(model, tokenizer, draft_model=drafter(), num_draft_tokens=3)
    p = prompt_of(5, 30)
    it = loop.submit(Request(p, 10, keep_state=True))
    state = drain(loop)[it][2].state
    cut = state.prefix(20)
    q = p[:20] + prompt_of(8, 6)
    a, b, c = loop.submit(Request(q, 12, prompt_state=cut)), loop.submit(Request(q, 12)), loop.submit(Request(p[:20], 5, prompt_state=cut))
    out = drain(loop)
    assert out[a][0] == out[b][0] and out[a][2].stats.accepted_by_position == out[b][2].stats.accepted_by_position
    assert out[a][2].stats.cached_tokens == 20 and out[c][2].stats.cached_tokens == 19
    check_alone("llama", p[:20], out[c][0], 5)
    for n in (0, 99):
        with pytest.raises(ValueError, match=f"has no prefix of {n}"): state.prefix(n)
    with pytest.raises(ValueError, match="that the prompt of 26 doesn't begin with"): loop.submit(Request(q, 12, prompt_state=state))


class Knowing(DSparkSource):
    "Takes in hidden states as a drafter does, and drafts what `Often` drafts."
    def start(self, prompts, **how):
        super().start(prompts, **how)
        self.often = Often(self.answers)
        self.often.start(prompts, **how)
    def observe(self, tokens, n, taps=None):
        super().observe(tokens, n, taps)
        self.often.observe(tokens, n)
    def propose(self, anchor, n, **how): return self.often.propose(anchor, n)
    def keep(self, rows):
        super().keep(rows)
        self.often = copy.copy(self.often)
        self.often.keep(rows)
    def join(self, other):
        super().join(other)
        self.often.rows = self.often.rows + other.often.rows


def test_hidden_states_reach_the_drafter():
    "Its context after a batch with joins, leaves and rejected drafts is that of one pass over the same tokens."
    model, tokenizer = tiny("gemma3")
    source, prompts, limits = Knowing(drafter("gemma3"), model), [prompt_of(i, 5 + 9 * i) for i in range(5)], [30, 8, 21, 14, 25]
    source.answers = [p + alone("gemma3", tuple(p), 40) for p in prompts]
    loop = ServeLoop(model, tokenizer, draft_model=source, num_draft_tokens=4, max_rows=3, prefill_step_size=16)
    ids = [loop.submit(Request(p, n, keep_state=True)) for p, n in zip(prompts, limits)]
    out = drain(loop)
    for id, p, n in zip(ids, prompts, limits):
        check_alone("gemma3", p, out[id][0], n)
        state, cache = out[id][2].state, source.drafter.make_cache()
        with Taps(model, source.tap_layers) as taps: model(mx.array([state.tokens]))
        source.drafter.extend(taps.take(), cache)
        m = len(state.tokens)
        assert state.source[1]["lengths"] == [m] and 0 < out[id][2].stats.n_accepted < out[id][2].stats.n_drafted
        np.testing.assert_allclose(np.array(state.source[0]["kv"])[:, :, :m], np.array(cache.kv)[:, :, :m], atol=2e-3)


# ---- how many drafts ----

def test_own_draft_lengths():
    model, tokenizer = tiny()
    loop = ServeLoop(model, tokenizer, draft_model=model, num_draft_tokens=3)
    a, b, c = (loop.submit(Request(prompt_of(i, 5), 30, num_draft_tokens=n, stop_tokens=NO_STOP)) for i, n in enumerate((None, 0, 5)))
    out = drain(loop)
    assert [out[x][2].stats.tau for x in (a, b, c)] == pytest.approx([30 / 9, 1, 30 / 6])
    assert [len(out[x][2].stats.drafted_by_position) for x in (a, b, c)] == [3, 0, 5]
    assert loop.counters["tokens"] == 90 and loop.counters["accepted"] == loop.counters["drafted"]


def test_confidence_threshold():
    model, tokenizer = tiny()
    prompts = [prompt_of(i, 5 + i) for i in range(4)]
    every = batch_generate(model, tokenizer, prompts, draft_model=drafter(), max_tokens=20)
    some = batch_generate(model, tokenizer, prompts, draft_model=drafter(), max_tokens=20, confidence_threshold=.5)
    none = batch_generate(model, tokenizer, prompts, draft_model=drafter(), max_tokens=20, confidence_threshold=1.0)
    for r in (every, some, none):
        for p, ids in zip(prompts, r.ids): check_alone("llama", p, ids, 20)
    assert sum(s.n_drafted for s in none.stats) == 0


def costs(slope, draft): return BatchCosts(Costs([1, 2, 64], [1.0, 1.0 + slope, 1.0 + 63 * slope]), [1, 16], [draft, draft * 4])


def fake_planner(monkeypatch, c, confident=False):
    made = []
    def make(model, source, max_rows):
        made.append(BatchPlanner(c, source.max_draft, confident=confident))
        return made[-1]
    monkeypatch.setattr(serve_loop, "make_planner", make)
    return made


class FakeClock:
    "Time as the costs say it passes; set by what the loop feeds."
    def __init__(self): self.now = 0.0
    def __call__(self): return self.now


def run_timed(monkeypatch, c, source_kind, fixed, n_rows=6, n=60, confident=False, closed=False):
    "Tokens a (simulated) millisecond of a batch."
    model, tokenizer = tiny()
    clock, prompts = FakeClock(), [prompt_of(i, 6) for i in range(n_rows)]
    fake_planner(monkeypatch, c, confident)
    source = source_of(source_kind, "llama", prompts, n)
    loop = ServeLoop(model, tokenizer, draft_model=source, num_draft_tokens=fixed, max_rows=16, clock=clock, closed=closed)
    feed_rows, propose = loop.cache.feed_rows, loop.sources.propose
    def timed_feed(ids, widths, tap=False):
        clock.now += 1e-3 * float(c.passes.pass_ms(sum(widths)))
        return feed_rows(ids, widths, tap)
    def timed_propose(anchors, k, want_confidence=False):
        clock.now += 1e-3 * c.propose_ms(len(anchors), k / loop.gamma)
        return propose(anchors, k, want_confidence)
    loop.cache.feed_rows, loop.sources.propose = timed_feed, timed_propose
    for p in prompts: loop.submit(Request(p, n, stop_tokens=NO_STOP))
    drain(loop)
    return n_rows * n / (1e3 * clock.now), loop


@pytest.mark.parametrize("kind", ("often", "dspark"))   # a good drafter and a random one
@pytest.mark.parametrize("n_rows, closed", ((1, False), (8, False), (8, True)))
@pytest.mark.parametrize("slope, draft", [(.02, .3), (.3, .3), (.05, 3.0)])
def test_scheduled_against_fixed_and_plain(monkeypatch, kind, n_rows, closed, slope, draft):
    "Simulated times, real loop: never below 0.97 of the better of plain and a fixed length; where only the end counts, of plain."
    c = costs(slope, draft)
    plain, _ = run_timed(monkeypatch, c, "none", 0, n_rows, 120)
    fixed = 0 if closed else max(run_timed(monkeypatch, c, kind, k, n_rows, 120)[0] for k in (2, 4))
    scheduled, loop = run_timed(monkeypatch, c, kind, None, n_rows, 120, closed=closed)
    assert scheduled >= (.97 if kind == "often" else .93) * max(plain, fixed), (scheduled, plain, fixed, loop.counters)


def test_parks_and_tries_again(monkeypatch):
    _, loop = run_timed(monkeypatch, costs(.5, .5), "dspark", None, 4, 120)
    lengths = loop.counters["verify_lengths"]
    assert loop.planner.parked and lengths[0] > 10 * sum(v for k, v in lengths.items() if k) > 0, lengths


def test_schedule_with_calibrated_confidences(monkeypatch):
    "Confidences choose the lengths; the ids stay."
    _, loop = run_timed(monkeypatch, costs(.001, .001), "dspark", None, 4, 40, confident=True)
    assert len(loop.counters["verify_lengths"]) > 2
    prompts = [prompt_of(i, 6) for i in range(4)]
    r = batch_generate(*tiny(), prompts, draft_model=drafter(), max_tokens=40)
    for p, ids in zip(prompts, r.ids): check_alone("llama", p, ids, 40)


@pytest.mark.parametrize("own", (None, 3))
@pytest.mark.parametrize("wait", (0.0, 1.0))
def test_confidences_read_late_and_lengths_of_a_request_own(monkeypatch, wait, own):
    "A calibrated drafter's planner, where confidences are read after the round (wait 1) or before, and rows that it doesn't decide on."
    c = costs(.001, .001)
    made = fake_planner(monkeypatch, c, confident=True)
    model, tokenizer = tiny()
    prompts = [prompt_of(i, 6) for i in range(3)]
    loop = ServeLoop(model, tokenizer, draft_model=drafter(), max_rows=4)
    made[0].wait = wait
    sure = []
    ids = {loop.submit(Request(p, 30, stop_tokens=NO_STOP, num_draft_tokens=own if i < 2 else None)): p for i, p in enumerate(prompts[:2])}
    for _ in range(5):
        for e in loop.step(): sure.append(loop.sure)
    ids |= {loop.submit(Request(prompts[2], 30, stop_tokens=NO_STOP)): prompts[2]}
    rows = {r.request.id: r for r in loop.rows}
    while loop.busy:
        loop.step()
        rows |= {r.request.id: r for r in loop.rows}
        sure.append(loop.sure)
    for key, p in ids.items(): check_alone("llama", p, rows[key].tokens[6:], 30)
    assert any(sure) == (wait > 0) and len(made[0].blocks) > 0


def test_profile_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_SPARK_CACHE", str(tmp_path))
    model, tokenizer = tiny()
    first = ServeLoop(model, tokenizer, draft_model=drafter(), max_rows=4).planner.costs
    monkeypatch.setattr(serve_loop, "profile_rows", None)
    again = ServeLoop(model, tokenizer, draft_model=drafter(), max_rows=4).planner.costs
    assert first == again and first.draft_rows == [1, 4] and first.passes.tokens[-1] >= 4 * 5


# ---- memory, bad input ----

def test_memory():
    model, tokenizer = tiny()
    loop = ServeLoop(model, tokenizer, max_rows=8)
    m = loop.memory()
    assert m["free"] == m["limit"] - m["weights"] - m["kv_now"] and m["kv_token"] == 4 * 2 * 2 * 32 * 4 and m["kv_now"] == 0
    limit = (m["weights"] + 4 * 128 * m["kv_token"] + 100) / 1e9
    loop = ServeLoop(model, tokenizer, max_rows=8, memory_limit_gb=limit)
    for i in range(5): loop.submit(Request(prompt_of(i, 40), 40, stop_tokens=NO_STOP))
    most = max(drain_watching(loop, lambda: loop.running))
    assert most == 4, "a fifth row would not have fitted"
    with pytest.raises(MemoryError, match=r"500 \+ 100 tokens need .* GB for weights and .* are there"): loop.submit(Request(prompt_of(0, 500), 100))


@pytest.mark.parametrize("wrong, words", [
    (dict(prompt=[]), "at least one token id"), (dict(prompt=[1, 999]), "whole numbers in 0..287"), (dict(prompt=[.5]), "at least one token"),
    (dict(max_tokens=0), "max_tokens must be a whole number >= 1, got 0"), (dict(num_draft_tokens=-1), "num_draft_tokens"), (dict(n_logprobs=-1), "n_logprobs"),
    (dict(n_logprobs=999), "at most 288"), (dict(stop="x"), "tuple of non-empty strings"), (dict(stop=("",)), "non-empty"), (dict(sampling="hot"), "Sampling"),
    (dict(processors=[3]), "functions"), (dict(max_tokens=True), "max_tokens")])
def test_bad_requests(wrong, words):
    loop = ServeLoop(*tiny())
    with pytest.raises(ValueError, match=words): loop.submit(Request(**{"prompt": [1, 2]} | wrong))
    assert not loop.busy


def test_bad_loops():
    loop = ServeLoop(*tiny())
    loop.submit(Request([1], id="a"))
    with pytest.raises(ValueError, match="a request 'a' already"): loop.submit(Request([1], id="a"))
    for options, words in ((dict(max_rows=0), "max_rows"), (dict(prefill_step_size=0), "prefill_step_size"), (dict(num_draft_tokens=-1), "num_draft_tokens"),
                           (dict(confidence_threshold=2), "0..1")):
        with pytest.raises(ValueError, match=words): ServeLoop(*tiny(), **options)
    with pytest.raises(RuntimeError, match="prompt 0: KeyError"):
        def bad(tokens, logits): raise KeyError("x")
        batch_generate(*tiny(), [[1]], logits_processors=lambda: [bad])


def test_batch_generate():
    r = batch_generate(*tiny(), ["hello", [1, 2, 3]], max_tokens=[4, 6], sampler=Sampling(temp=1.0), seed=3, return_logprobs=True)
    assert [len(x) for x in r.ids] == [len(x) for x in r.logprobs] == [4, 6] and [s.completion_tokens for s in r.stats] == [4, 6]
    again = batch_generate(*tiny(), [[1, 2, 3]], max_tokens=6, sampler=Sampling(temp=1.0), seed=4)
    assert again.ids[0] == r.ids[1] and again.texts[0] == r.texts[1]


@pytest.mark.parametrize("law", (Sampling(), Sampling(temp=1.0)))
def test_no_choice_of_lengths_biases_an_answer(law, monkeypatch):
    "Not even one that looks at the drafts: verify a draft only where it is an even token, or at random."
    model, tokenizer = tiny()
    prompts, rng = [prompt_of(i, 4 + i) for i in range(3)], np.random.default_rng(0)
    run = lambda **options: batch_generate(model, tokenizer, prompts, max_tokens=24, sampler=law, seed=1, **options).ids
    plain, draft_round = run(), serve_loop.draft_round
    for choose in (lambda ids: next((i for i, t in enumerate(ids) if t % 2), len(ids)), lambda ids: int(rng.integers(0, len(ids) + 1))):
        def biased(loop):
            draft, lengths = draft_round(loop)
            return draft, [choose(ids[:n]) for ids, n in zip(draft.tokens.tolist(), lengths)] if draft else lengths
        monkeypatch.setattr(serve_loop, "draft_round", biased)
        assert run(draft_model=model, num_draft_tokens=4) == plain


def test_made_in_one_thread_and_turned_in_another():
    model, tokenizer = tiny()
    loop, out = ServeLoop(model, tokenizer, draft_model=drafter(), num_draft_tokens=4), []
    ids = [loop.submit(Request(prompt_of(i, 6), 9)) for i in range(3)]
    thread = threading.Thread(target=lambda: out.append(drain(loop)))
    thread.start(); thread.join()
    for i, id in enumerate(ids): check_alone("llama", prompt_of(i, 6), out[0][id][0], 9)
