"Speculative decoding against mlx-lm's plain decoding: every tiny family, source and mode, every way to end, recorded traces."
import copy
import json
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path

import mlx_spark  # before MLX: preloads OpenBLAS
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.generate import stream_generate as mlx_stream_generate
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.utils import load_model

from mlx_spark.cache import cache_offset, make_cache
from mlx_spark.dspark import load_drafter
from mlx_spark.sources import Draft, DraftSource, ModelSource, NoSource, PromptLookup, as_source
from mlx_spark.targets import TINY_FAMILIES, tiny_target
from mlx_spark.taps import Taps
from mlx_spark.train import new_drafter

loop = import_module("mlx_spark.generate")
GOLDENS = Path(__file__).parent.parent / "goldens" / "deepspec"
PROMPT = mx.array(np.random.default_rng(3).integers(0, 256, 21), dtype=mx.uint32)
MODES = {
    "plain": {}, "quantized": dict(kv_bits=4, kv_group_size=32, quantized_kv_start=0),
    "quantized later": dict(kv_bits=8, kv_group_size=32, quantized_kv_start=33), "bounded": dict(max_kv_size=24)}

@cache
def tiny(family, **options): return tiny_target(family, **options)

def source_of(name, family):
    if name == "lookup": return PromptLookup(ngram=1, min_ngram=1)
    if name == "none": return NoSource()
    if name == "dspark": return new_drafter(tiny(family)[0], layers=1, gamma=4, rank=8, mask_token=2).as_source(tiny(family)[0])
    return ModelSource(tiny(family, **{"rounded": dict(bits=8), "stranger": dict(seed=1), "itself": {}}[name])[0])

def able(family, mode):
    "What mlx-lm can do: no quantized windows, and a bound only where the model doesn't make its own caches."
    if mode == "bounded": return family in ("qwen3", "qwen3_moe")
    return mode == "plain" or not family.startswith("gemma")

def plain_ids(model, prompt, n, **options): return [t for t, _ in generate_step(prompt, model, max_tokens=n, **options)]
def spec(model, source, prompt, n, **options):
    return list(loop.speculative_step(prompt, model, source, max_tokens=n, **options))
def ids_of(steps): return [step.token for step in steps]
def next_row(model, cache): return model(mx.array([[65]]), cache=cache)[0, -1]
def close(a, b, eps=1e-3): return mx.abs(a - b).max().item() < eps

CASES = [(f, m) for f in TINY_FAMILIES for m in MODES if able(f, m)]

@pytest.mark.parametrize("family, mode", CASES)
def test_ids_and_cache_equal_plain_decoding(family, mode):
    model, options = tiny(family)[0], {k: v for k, v in MODES[mode].items() if k != "max_kv_size"}
    caches = lambda: make_cache(model, max_kv_size=MODES[mode].get("max_kv_size"))
    plain_cache = caches()
    want = plain_ids(model, PROMPT, 40, prompt_cache=plain_cache, prefill_step_size=8, **options)
    for name in ("rounded", "stranger", "itself", "lookup", "dspark", "none"):
        ours = caches()
        got = ids_of(spec(model, source_of(name, family), PROMPT, 40, prompt_cache=ours, prefill_step_size=8, **options))
        difference = loop.compare_ids(model, PROMPT, want, got, prefill_step_size=8, **MODES[mode])
        assert difference is None or difference.tie, (name, difference)
        assert cache_offset(ours) == cache_offset(plain_cache) == len(PROMPT) + 40
        if difference is None and "quantized" not in mode: assert close(next_row(model, ours), next_row(model, copy.deepcopy(plain_cache)))

@pytest.mark.parametrize("family, mode", CASES)
def test_closed_after_any_token(family, mode):
    model, options = tiny(family)[0], {k: v for k, v in MODES[mode].items() if k != "max_kv_size"}
    for k in (0, 1, 2, 4, 7):
        rows = []
        for steps in (lambda c: loop.speculative_step(PROMPT, model, source_of("rounded", family), prompt_cache=c, **options),
                      lambda c: generate_step(PROMPT, model, prompt_cache=c, **options)):
            cache = make_cache(model, max_kv_size=MODES[mode].get("max_kv_size"))
            steps = steps(cache)
            for _ in range(k): next(steps)
            steps.close()
            if k: assert cache_offset(cache) == len(PROMPT) + k
            rows.append(next_row(model, cache))
        if k and "quantized" not in mode: assert close(*rows)

class Script:
    "A planner that parks in the rounds it is told to."
    confident, gamma = False, 4
    def __init__(self, *parked): self.script, self.n = parked, 0
    @property
    def parked(self): return self.script[min(self.n, len(self.script) - 1)]
    def draft_length(self): return 0 if self.parked else 4
    def verify_length(self, conf=None): return 3
    def observe(self, *seen, **how): self.n += 1

@pytest.mark.parametrize("family, mode", CASES)
def test_parked_and_back(family, mode):
    model, options = tiny(family)[0], {k: v for k, v in MODES[mode].items() if k != "max_kv_size"}
    caches = lambda: make_cache(model, max_kv_size=MODES[mode].get("max_kv_size"))
    plain_cache = caches()
    want = plain_ids(model, PROMPT, 40, prompt_cache=plain_cache, **options)
    for name in ("rounded", "lookup", "dspark"):
        ours, plan = caches(), Script(*[False] * 3, *[True] * 7, *[False] * 3, True)
        steps = spec(model, source_of(name, family), PROMPT, 40, prompt_cache=ours, planner=plan, **options)
        difference = loop.compare_ids(model, PROMPT, want, ids_of(steps), **MODES[mode])
        assert difference is None or difference.tie, (name, difference)
        assert cache_offset(ours) == len(PROMPT) + 40 == ours[0].source_state.n_tokens
        assert any(s.cycle.parked for s in steps[:20]) and not all(s.cycle.parked for s in steps[5:20]) and steps[-1].cycle.parked
        if difference is None and "quantized" not in mode: assert close(next_row(model, ours), next_row(model, copy.deepcopy(plain_cache)))

@pytest.mark.parametrize("family, mode", CASES)
def test_closed_while_parked(family, mode):
    model, options = tiny(family)[0], {k: v for k, v in MODES[mode].items() if k != "max_kv_size"}
    for k in (1, 2, 3, 6):
        rows = []
        for steps in (lambda c: loop.speculative_step(PROMPT, model, source_of("rounded", family), prompt_cache=c, planner=Script(True), **options),
                      lambda c: generate_step(PROMPT, model, prompt_cache=c, **options)):
            cache = make_cache(model, max_kv_size=MODES[mode].get("max_kv_size"))
            steps = steps(cache)
            for _ in range(k): next(steps)
            steps.close()
            assert cache_offset(cache) == len(PROMPT) + k
            rows.append(next_row(model, cache))
        if "quantized" not in mode: assert close(*rows)

@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("n", range(6))
def test_fails_while_parked(family, n):
    "The target fails in its n-th parked pass; or a processor does: what was handed out stays, and nothing else."
    model, got, calls = tiny(family)[0], [], []
    class Broken:
        def __call__(self, tokens, logits):
            if len(tokens) == len(PROMPT) + n: raise RuntimeError("no rule")
            return logits
    cache = make_cache(model)
    with pytest.raises(RuntimeError, match="no rule"):
        for step in loop.speculative_step(PROMPT, model, source_of("rounded", family), prompt_cache=cache, planner=Script(False, True), logits_processors=[Broken()]):
            got.append(step.token)
    assert len(got) == n and cache_offset(cache) == len(PROMPT) + n
    original = type(model).__call__
    def failing(self, *args, **kwargs):
        if self is model:
            calls.append(1)
            if len(calls) > 2 + n: raise RuntimeError("device lost")
        return original(self, *args, **kwargs)
    got, cache = [], make_cache(model)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="device lost"):
        patch.setattr(type(model), "__call__", failing)
        for step in loop.speculative_step(PROMPT, model, source_of("rounded", family), prompt_cache=cache, planner=Script(False, True)): got.append(step.token)
    assert (cache_offset(cache) - len(PROMPT), len(got)) == (n, max(n, 1))     # the pass started ahead is the one that fails
    assert close(next_row(model, cache), next_row_after(model, got[:n]))

@pytest.mark.parametrize("name", ("stranger", "rounded", "lookup", "dspark"))
def test_users_get_a_schedule_and_the_same_text(name):
    model, tokenizer = tiny("llama")
    want = plain_ids(model, PROMPT, 200)
    rs = list(loop.stream_generate(model, tokenizer, PROMPT, 200, source_of(name, "llama")))
    assert [r.token for r in rs] == want[:len(rs)] and (len(rs) == 200 or rs[-1].finish_reason == "stop")
    if name == "stranger": assert sum(r.parked for r in rs) > 100    # a random model with a whole forward pass a draft
    fixed = list(loop.stream_generate(model, tokenizer, PROMPT, 60, source_of(name, "llama"), num_draft_tokens=3))
    assert not any(r.parked for r in fixed) and max(r.verify_length for r in fixed) == (3 if name != "lookup" else max(r.verify_length for r in fixed))
    off = list(loop.stream_generate(model, tokenizer, PROMPT, 60, source_of(name, "llama"), schedule=False))
    assert not any(r.parked for r in off)

def test_a_seed_repeats_a_sampled_text_in_spite_of_the_clock(monkeypatch):
    from mlx_spark.verify import Sampling
    model, tokenizer = tiny("llama")
    ids = lambda: [r.token for r in loop.stream_generate(model, tokenizer, PROMPT, 80, source_of("rounded", "llama"), sampler=Sampling(temp=1.0), seed=7)]
    want, clock = ids(), loop.time.perf_counter
    for factor in (100, 1e-3):
        monkeypatch.setattr(loop.time, "perf_counter", lambda: factor * clock() * np.random.random())
        assert ids() == want
        monkeypatch.undo()

class Failing(ModelSource):
    "Fails in its n-th call of one method."
    def __init__(self, model, method, n, error):
        super().__init__(model)
        self.left, self.error = n, error
        setattr(self, method, self.failing(getattr(self, method)))
    def failing(self, original):
        def f(*args, **kwargs):
            self.left -= 1
            if self.left == 0: raise self.error
            return original(*args, **kwargs)
        return f

@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("method, n, error", [
    ("propose", 1, RuntimeError("no idea")), ("propose", 3, RuntimeError("no idea")), ("observe", 1, RuntimeError("not listening")),
    ("observe", 4, RuntimeError("not listening")), ("propose", 2, KeyboardInterrupt())])
def test_source_fails(family, method, n, error):
    model, cache, got = tiny(family)[0], make_cache(tiny(family)[0]), []
    source = Failing(tiny(family, bits=8)[0], method, n, error)
    with pytest.raises(type(error)):
        for step in loop.speculative_step(PROMPT, model, source, max_tokens=40, prompt_cache=cache): got.append(step.token)
    want = plain_ids(model, PROMPT, 40)
    assert got == want[:len(got)] and len(got) < 40
    if got: assert cache_offset(cache) == len(PROMPT) + len(got)
    if got and isinstance(error, RuntimeError): assert not hasattr(cache[0], "source_state")
    if got: assert close(next_row(model, cache), next_row_after(model, got))
    assert spec(model, ModelSource(tiny(family, bits=8)[0]), PROMPT, 40)[-1].token == want[-1]      # the model is as it was

def next_row_after(model, got):
    cache = make_cache(model)
    model(mx.concatenate([PROMPT, mx.array(got, dtype=mx.uint32)])[None], cache=cache)
    return next_row(model, cache)

@pytest.mark.parametrize("family", ("llama", "gemma3", "qwen3_next"))
def test_target_fails(family, monkeypatch):
    model, cache, got, calls = tiny(family)[0], make_cache(tiny(family)[0]), [], []
    original = type(model).__call__
    def failing(self, *args, **kwargs):
        if self is model:
            calls.append(1)
            if len(calls) > 4: raise RuntimeError("device lost")
        return original(self, *args, **kwargs)
    monkeypatch.setattr(type(model), "__call__", failing)
    with pytest.raises(RuntimeError, match="device lost"):
        for step in loop.speculative_step(PROMPT, model, source_of("rounded", family), prompt_cache=cache): got.append(step.token)
    monkeypatch.undo()
    assert cache_offset(cache) == len(PROMPT) + len(got) - 1 and len(got) > 1     # the last token could not be fed
    assert close(next_row(model, cache), next_row_after(model, got[:-1]))

@pytest.mark.parametrize("start", range(20, 33))
def test_quantization_starts_at_the_same_token(start):
    model, kv = tiny("llama")[0], dict(kv_bits=4, kv_group_size=32, quantized_kv_start=start)
    want = plain_ids(model, PROMPT, 24, **kv)
    for name in ("rounded", "itself"): assert ids_of(spec(model, source_of(name, "llama"), PROMPT, 24, **kv)) == want

@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_processors_and_closures(family):
    model, calls = tiny(family)[0], []
    def recorder(tokens, logits):
        calls.append(tokens.tolist())
        return logits
    penalty = make_logits_processors(repetition_penalty=1.4, frequency_penalty=.5, logit_bias={65: 3.0}) + [recorder]
    draw = make_sampler(temp=.9, top_p=.95, min_p=.01)
    for options in (dict(logits_processors=penalty), dict(sampler=draw), dict(sampler=draw, logits_processors=penalty)):
        mx.random.seed(5)
        calls.clear()
        want = plain_ids(model, PROMPT, 30, **options)
        plain_calls = list(calls)
        calls.clear()
        assert ids_of(spec(model, source_of("rounded", family), PROMPT, 30, seed=5, **options)) == want
        assert calls[:30] == plain_calls[:30]
        assert all((PROMPT.tolist() + want)[:len(c)] == c for c in calls[:30])

@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("name", ("rounded", "lookup"))
def test_turns_saved_and_loaded(family, name, tmp_path):
    model, file = tiny(family)[0], str(tmp_path / "turns")
    source, prompt_cache, said, taus = source_of(name, family), make_cache(model), PROMPT.tolist(), []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for new in ([], [66, 67], [68]):
            prompt = mx.array(new, dtype=mx.uint32) if new else PROMPT
            steps = spec(model, source, prompt, 12, prompt_cache=prompt_cache)
            said += new + ids_of(steps)
            loop.save_prompt_cache(file, prompt_cache)
            prompt_cache = loop.load_prompt_cache(file)
    assert cache_offset(prompt_cache) == len(said)
    fresh, want = make_cache(model), PROMPT.tolist()
    for new in ([], [66, 67], [68]):
        prompt = mx.array(new, dtype=mx.uint32) if new else PROMPT
        want += new + plain_ids(model, prompt, 12, prompt_cache=fresh)
    assert said == want

def test_memory_of_the_source_keeps_acceptance():
    model = tiny("llama")[0]
    def second_turn(forget):
        prompt_cache = make_cache(model)
        spec(model, source_of("itself", "llama"), PROMPT, 12, prompt_cache=prompt_cache)
        if forget: del prompt_cache[0].source_state
        return spec(model, source_of("itself", "llama"), mx.array([66]), 30, prompt_cache=prompt_cache)
    with pytest.warns(UserWarning, match="none was saved"): forgotten = second_turn(True)
    kept = second_turn(False)
    assert ids_of(kept) == ids_of(forgotten)
    assert kept[-1].cycle.tau > 4 > 2 > forgotten[-1].cycle.tau

class Tapped(ModelSource):
    tap_layers = (0, 2)
    def observe(self, committed, n_committed, taps=None):
        super().observe(committed, n_committed)
        self.taps = getattr(self, "taps", []) + [taps]

@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_interleaved_requests_on_one_tapped_model(family):
    model, other = tiny(family)[0], PROMPT[:9]
    want = plain_ids(model, PROMPT, 24), plain_ids(model, other, 24)
    sources = [Tapped(tiny(family, bits=8)[0]) for _ in range(2)]
    runs = [loop.speculative_step(p, model, s, max_tokens=24, prompt_cache=make_cache(model)) for p, s in zip((PROMPT, other), sources)]
    got = [], []
    for pair in zip(*runs):
        for ids, step in zip(got, pair): ids.append(step.token)
    for steps in runs: steps.close()
    assert got == want
    for prompt, source, ids in zip((PROMPT, other), sources, got):
        with Taps(model, (0, 2)) as taps:
            model(mx.concatenate([prompt, mx.array(ids, dtype=mx.uint32)])[None])
            whole = taps.take()
        given = mx.concatenate(source.taps, axis=1)
        assert given.shape == whole.shape and close(given, whole, 1e-4 * mx.abs(whole).max().item())

@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "4 bits", "8 bits"))
def test_rounded_targets_differ_by_ties_only(family, dtype):
    if "float" in dtype and family in ("qwen3_moe", "qwen3_next") and mx.default_device() == mx.cpu:
        pytest.skip("on a CPU MLX gathers experts in float32 only")
    model = tiny_target(family, bits=int(dtype[0]) if "bits" in dtype else None)[0]
    if "float" in dtype: model.set_dtype(getattr(mx, dtype))
    want = plain_ids(model, PROMPT, 30)
    for name in ("rounded", "lookup"):
        difference = loop.compare_ids(model, PROMPT, want, ids_of(spec(model, source_of(name, family), PROMPT, 30)))
        assert difference is None or difference.tie, difference

@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_responses_equal_mlx_lm(family):
    model, tokenizer = tiny_target(family)
    told = lambda rs: [(r.text, r.token, r.generation_tokens, r.prompt_tokens, r.finish_reason) for r in rs]
    want = plain_ids(model, mx.array(tokenizer.encode("Hello, ")), 14)
    for stop in (want[2], want[4], want[9]):
        tokenizer.eos_token_ids = [stop]
        for n in (-1, 1, 3, 14):
            theirs = told(mlx_stream_generate(model, tokenizer, "Hello, ", n))
            for source in (None, source_of("itself", family), source_of("rounded", family)):
                assert told(loop.stream_generate(model, tokenizer, "Hello, ", n, source)) == theirs

def test_broken_out_of_a_text_stream():
    model, tokenizer = tiny("qwen3")
    prompt_cache = make_cache(model)
    for r in loop.stream_generate(model, tokenizer, PROMPT, 30, source_of("itself", "qwen3"), prompt_cache=prompt_cache):
        if r.generation_tokens == 4: break
    del r
    import gc; gc.collect()
    assert cache_offset(prompt_cache) == len(PROMPT) + 4

@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("name", ("rounded", "lookup", "dspark"))
def test_one_read_a_cycle(family, name, monkeypatch):
    model, reads = tiny(family)[0], []
    source = source_of(name, family)
    spec(model, source, PROMPT[:1], 4)
    for name in ("item", "tolist", "__int__", "__float__", "__bool__", "__array__"):
        original = getattr(mx.array, name)
        monkeypatch.setattr(mx.array, name, lambda self, *a, _f=original: (reads.append(1), _f(self, *a))[1])
    evaluate = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *a: (reads.append(1), evaluate(*a))[1])
    counts = {}
    for n in (10, 40):
        reads.clear()
        steps = spec(model, source, PROMPT[:1], n)
        counts[n] = len(reads) - len({id(s.cycle) for s in steps})
    assert counts[10] == counts[40]                                  # what is left over belongs to the start, not to cycles

class Recorded(DraftSource):
    "Proposes what a trace recorded."
    name, max_draft = "recorded", 7
    def __init__(self, rounds): self.rounds = iter(rounds)
    def propose(self, anchor, n, *, key=None, want_probs=False, want_confidence=False):
        r = next(self.rounds)
        assert anchor == [r["anchor"]]
        confidence = mx.sigmoid(mx.array([r["confidence_logits"][:n]])) if r["confidence_logits"] else None
        return Draft(mx.array([r["draft_tokens"][:n]], dtype=mx.uint32), confidence=confidence)

@pytest.mark.parametrize("file", sorted((GOLDENS / "traces").glob("*__*.jsonl")), ids=lambda f: f.stem)
def test_recorded_traces(file):
    traces = [json.loads(line) for line in file.read_text().splitlines()]
    model = golden_target(traces[0]["target"])
    for t in traces[:4]:
        limits = dict(stop_tokens=t["stop_token_ids"] or (), confidence_threshold=t["confidence_threshold"])
        steps = spec(model, Recorded(t["rounds"]), mx.array(t["prompt_ids"]), t["max_new_tokens"], num_draft_tokens=7, **limits)
        assert t["prompt_ids"] + ids_of(steps) == t["output_ids"]
        done = list({id(s.cycle): s.cycle for s in steps[1:]}.values())
        for c, r in zip(done, t["rounds"]):
            if c.verify_length < r["proposal_length"]: break         # close to the end ours proposes less
            n_accepted = min(r["accepted_draft_tokens"], len(c.tokens))
            assert (c.verify_length, c.n_accepted, c.tokens) == (r["proposal_length"], n_accepted, r["committed_tokens"][:len(c.tokens)])

@cache
def golden_target(name): return load_model(GOLDENS / "targets" / name)[0]

@pytest.mark.parametrize("name", sorted(p.name for p in (GOLDENS / "drafters").iterdir()))
def test_trained_drafters(name):
    target = "qwen3_tiny" if name.startswith("q3") else "gemma4_tiny"
    model = golden_target(target)
    source = as_source(load_drafter(GOLDENS / "drafters" / name, model), target=model)
    for a in json.loads((GOLDENS / "traces" / f"target_greedy_{target}.json").read_text())[:3]:
        steps = spec(model, source, mx.array(a["prompt_ids"]), a["max_new_tokens"])
        assert ids_of(steps) == a["greedy_new_tokens"]
        assert steps[-1].cycle.tau > 1.5
