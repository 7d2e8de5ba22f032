"Schedules, their losslessness, parking and step costs: what is too long for a notebook cell."
import json
import os
from itertools import product
from pathlib import Path

import mlx_spark  # noqa: F401  (loads a BLAS before MLX)
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mlx_spark.scheduler import (
    Costs, CostWatch, Parking, Planner, algorithm1, best_length, capacity, check_golden, costs_folder, measured_costs,
    observe_round, threshold_lengths, top_k_lengths)

ROOT = Path(__file__).parents[1]
SUITE = Path(os.environ.get("MLX_SPARK_GOLDENS", ROOT / "goldens/deepspec"))


# ---- Algorithm 1 ----

@pytest.mark.parametrize("case", check_golden(SUITE / "scheduler"), ids=lambda c: c.name)
def test_golden(case): assert case.status == "pass" and case.checked, case.note


def test_golden_notices(tmp_path):
    rows = [json.loads(line) for line in (SUITE / "scheduler/algorithm1.jsonl").read_text().splitlines()]
    rows[7]["algorithm1_lengths"][0] += 1
    (tmp_path / "algorithm1.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [c.status for c in check_golden(tmp_path)].count("fail") == 1


confs = st.integers(1, 4).flatmap(lambda g: st.lists(st.lists(st.floats(0, 1), min_size=g, max_size=g), min_size=1, max_size=4))


@given(confs, st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_algorithm1_properties(conf, seed):
    R, g = np.shape(conf)
    sps = np.r_[0, np.random.default_rng(seed).random(R * (g + 1)) + .1]
    stop, free = (algorithm1(conf, sps, early_stop=e) for e in (True, False))
    a = np.cumprod(conf, axis=1)
    for s in (stop, free):
        assert all(0 <= n <= g for n in s.lengths)
        tau = R + sum(a[r, :n].sum() for r, n in enumerate(s.lengths))
        assert s.throughput == pytest.approx(tau * sps[R + sum(s.lengths)])
    assert free.throughput >= stop.throughput >= R * sps[R]
    if (g + 1) ** R <= 125:
        sps = np.r_[0, np.sort(sps[1:])[::-1]]                  # longer passes are never faster
        free = algorithm1(conf, sps, early_stop=False)
        every = [(R + sum(a[r, :n].sum() for r, n in enumerate(l))) * sps[R + sum(l)] for l in product(range(g + 1), repeat=R)]
        assert free.throughput == pytest.approx(max(every))


@given(confs, st.integers(0, 2**32 - 1), st.integers(0, 16))
@settings(max_examples=200, deadline=None)
def test_nothing_admitted_depends_on_what_is_not(conf, seed, k):
    "Change all confidences that a draft beyond the chosen length would have produced: the choice stays."
    rng, conf = np.random.default_rng(seed), np.array(conf)
    R, g = conf.shape
    sps = np.r_[0, rng.random(R * (g + 1)) + .1]
    for rule in (lambda c: algorithm1(c, sps).lengths, lambda c: top_k_lengths(c, k), lambda c: threshold_lengths(c, .5)):
        lengths = rule(conf)
        for r, n in enumerate(lengths):
            other = conf.copy()
            other[r, n + 1:] = rng.random(len(other[r, n + 1:]))
            assert rule(other)[r] == n


@given(confs, st.integers(0, 16))
@settings(max_examples=60, deadline=None)
def test_top_k_admits_k(conf, k):
    a = np.cumprod(conf, axis=1)
    lengths = top_k_lengths(conf, k)
    assert sum(lengths) == min(k, (a > 0).sum())
    inside = [a[r, n - 1] for r, n in enumerate(lengths) if n]
    outside = [a[r, n] for r, n in enumerate(lengths) if n < a.shape[1]]
    assert not inside or not outside or min(inside) >= max(outside)


def test_threshold_is_strict(): assert threshold_lengths([[.5, .5], [.5, .4]], .5) == [2, 1]


def test_capacity_beats_the_early_stop_behind_a_bump():
    conf = [[.9] * 4] * 4
    sps = np.r_[0, [1.0] * 4, [.5] * 16]
    assert algorithm1(conf, sps).lengths == [0] * 4 and top_k_lengths(conf, capacity(conf, sps)) == [4] * 4


# ---- the law of the text ----

TARGET = np.array([[.7, .3], [.9, .1]])          # next token after A, after B
DRAFT = np.array([[.5, .5], [.2, .8]])
ACCEPT = np.minimum(TARGET, DRAFT).sum(axis=1)   # of a draft behind A, behind B


def law_of_two(lengths_for) -> np.ndarray:
    "Exact law of the first two tokens behind A, if `lengths_for(conf)` decides how many of two drafts to verify."
    out = np.zeros((2, 2))
    for x in product(range(2), repeat=2):
        conf = [ACCEPT[0], ACCEPT[x[0]]]
        n, chance, state = lengths_for(conf), DRAFT[0, x[0]] * DRAFT[x[0], x[1]], 0
        alive, tokens = chance, []
        for i in range(2):
            p, q = TARGET[state], DRAFT[state]
            if i >= n: break
            kept = alive * min(1, p[x[i]] / q[x[i]])
            redraw = np.maximum(p - q, 0)
            for y in range(2) if redraw.sum() else ():
                _finish(out, [*tokens, y], (alive - kept) * redraw[y] / redraw.sum())
            alive, tokens, state = kept, [*tokens, x[i]], x[i]
        if len(tokens) < 2:
            for y in range(2): _finish(out, [*tokens, y], alive * TARGET[state][y])
        else: out[tuple(tokens)] += alive
    return out


def _finish(out, tokens, chance):
    "Add a prefix of one or two tokens; a missing second one comes from the target."
    if len(tokens) == 2: out[tuple(tokens)] += chance
    else: out[tokens[0]] += chance * TARGET[tokens[0]]


WANTED = TARGET[0][:, None] * TARGET


def test_rules_for_sampling_keep_the_law():
    for seed in range(400): check_law(seed)


def check_law(seed):
    rng = np.random.default_rng(seed)
    ms, rate, usual, sps = np.cumsum(rng.random(3)), rng.random() * 2, rng.random(2), np.r_[0, rng.random(3) + .1]
    rules = {"usual": lambda c: best_length(c, ms, rate, usual=usual), "algorithm 1": lambda c: algorithm1([c], sps).lengths[0],
             "top k": lambda c: top_k_lengths([c], seed % 3)[0], "threshold": lambda c: threshold_lengths([c], .75)[0]}
    for name, rule in rules.items(): np.testing.assert_allclose(law_of_two(rule), WANTED, atol=1e-12, err_msg=name)


def test_looking_ahead_breaks_the_law():
    "Cost curves exist at which the rules without a stop read the first draft off the second confidence."
    worst = 0.0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        sps, ms, rate = np.r_[0, rng.random(3) + .1], np.cumsum(rng.random(3)), rng.random() * 2
        for rule in (lambda c: algorithm1([c], sps, early_stop=False).lengths[0], lambda c: best_length(c, ms, rate)):
            worst = max(worst, np.abs(law_of_two(rule) - WANTED).max())
    assert worst > .05


# ---- parking ----

def drive(cost: float, kept, n: int, parking: Parking, changes=()) -> np.ndarray:
    "Time at which each token is there, in plain steps."
    times = [0.0]
    while len(times) <= n:
        if parking.parked:
            times.append(times[-1] + 1)
            parking.plain(len(times) in changes)
        else:
            m = 1 + kept(len(times))
            times += [times[-1] + cost] * m
            parking.speculated(m, cost)
    return np.array(times[:n + 1])


@pytest.mark.parametrize("cost", [1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("changes", [(), tuple(range(0, 5000, 7))], ids=["quiet", "restless text"])
@pytest.mark.parametrize("accept", [0.0, 0.02])
def test_random_drafter(cost, changes, accept):
    rng = np.random.default_rng(0)
    times = drive(cost, lambda i: int(rng.random() < accept), 4096, Parking(), changes)
    for end in (192, 256, 512, 1024, 4096): assert (end - 64) / (times[end] - times[64]) >= .97


@pytest.mark.parametrize("death", [100, 500, 2000])
def test_a_drafter_that_dies_is_parked(death):
    parking = Parking()
    times = drive(2.0, lambda i: 4 if i < death else 0, death + 400, parking)
    assert times[death + 400] - times[death] < 400 + parking.bank + parking.limit + 8


@pytest.mark.parametrize("seed", range(5))
def test_a_good_drafter_is_not_parked(seed):
    rng, parked = np.random.default_rng(seed), 0
    parking = Parking()
    for _ in range(3000):
        parked += parking.parked
        if parking.parked: parking.plain()
        else: parking.speculated(1 + int(np.cumprod(rng.random(7) < .75).sum()), 2.0)
    assert parked < 150


# ---- the planner ----

COSTS = {"flat": Costs([1, 8], [10, 11], 3), "linear": Costs([1, 2, 8], [10, 14, 38], 2), "cliff": Costs([1, 2, 8], [10, 17, 17], 2),
         "dear drafter": Costs([1, 8], [10, 11], 60)}


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("mean", [-12, -1, 0.5, 1.5, 3])
@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("with_confidence", [True, False])
def test_planner_never_loses_to_a_fixed_length(name, mean, greedy, with_confidence):
    costs, rng, N = COSTS[name], np.random.default_rng(1), 1500
    conf = 1 / (1 + np.exp(-(mean + 1.5 * rng.normal(size=(N, 1)) + .7 * rng.normal(size=(N, 7)))))
    kept = np.cumprod(rng.random((N, 7)) < conf, axis=1)
    tau = 1 + np.r_[0, np.cumsum(kept.mean(axis=0))]
    best = max([1 / costs.plain_ms, *(tau[n] / costs.round_ms(n) for n in range(1, 8))])
    planner, ms, tokens = Planner(costs, 7, greedy=greedy), 0.0, 0
    for c, y in zip(conf, kept):
        drafted = planner.draft_length() > 0
        n = planner.verify_length(c if with_confidence else None) if drafted else 0
        m, t = int(y[:n].sum()), costs.round_ms(n) if drafted else costs.plain_ms
        observe_round(planner, n, m, t, drafted=drafted)
        ms, tokens = ms + t, tokens + 1 + m
    assert tokens / ms >= .97 * best


def test_planner_on_a_slower_clock():
    "Everything three times slower than profiled: same lengths, and no parking by mistake once a plain step was seen."
    lengths = []
    for factor in (1, 3):
        planner, rng, seen = Planner(COSTS["flat"], 7), np.random.default_rng(0), []
        observe_round(planner, 0, 0, 10.0 * factor, drafted=False)
        for _ in range(200):
            conf = rng.random(7) ** .3
            seen.append(planner.verify_length(conf))
            m = int(np.cumprod(rng.random(7) < conf)[:seen[-1]].sum())
            observe_round(planner, seen[-1], m, factor * COSTS["flat"].round_ms(seen[-1]), drafted=True)
            assert not planner.parked
        lengths.append(seen)
    assert lengths[0] == lengths[1]


def test_planner_refuses():
    with pytest.raises(ValueError, match="at least 1 draft"): Planner(COSTS["flat"], 0)


# ---- step costs ----

def test_costs_survive_an_unwritable_cache(tmp_path, monkeypatch):
    from mlx_spark.targets import tiny_target
    model, _ = tiny_target("llama")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLX_SPARK_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="could not be kept"): costs = measured_costs(model, tokens=[1, 2], repeats=1, least_s=0)
    assert costs.tokens == [1, 2] and costs_folder().parent == tmp_path / "file"


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "qwen3_next"])
def test_profile_leaves_no_trace(family, tmp_path, monkeypatch):
    import mlx.core as mx
    from mlx_spark.scheduler import profile
    from mlx_spark.sources import PromptLookup
    from mlx_spark.targets import tiny_target
    model, _ = tiny_target(family)
    before = model(mx.array([[1, 2, 3]]))
    costs = profile(model, PromptLookup(), context=24, tokens=[1, 2, 5], repeats=2)
    assert min(costs.verify_ms) > 0 and mx.array_equal(before, model(mx.array([[1, 2, 3]])))


def test_watch_needs_two_lengths():
    watch = CostWatch(COSTS["flat"])
    for _ in range(64): watch.observe(3, 1000.0)
    assert not watch.stale

def test_a_hopeless_record_is_parked_on_little_credit_and_a_poor_start_forgiven():
    "Nothing kept: five rounds at most. Two misses and then hits: never."
    for confident in (True, False):
        planner, rounds = Planner(COSTS["flat"], 7, timed=False, confident=confident), 0
        while not planner.parked and rounds < 50:
            planner.observe(7, 0, 0, drafted=True)
            rounds += 1
        assert planner.parking.loss <= 6, planner.parking
        planner = Planner(COSTS["flat"], 7, timed=False, confident=confident)
        for kept in (0, 0, *[3, 1, 5, 2] * 8):
            planner.observe(7, kept, 0, drafted=True)
            assert not planner.parked

def test_a_profile_found_wrong_is_taken_anew_by_the_next_request_but_not_by_every_one(monkeypatch, tmp_path):
    import mlx_spark.scheduler as scheduler
    from mlx_spark.sources import PromptLookup
    from mlx_spark.targets import tiny_target
    monkeypatch.setenv("MLX_SPARK_CACHE", str(tmp_path))
    monkeypatch.setattr(scheduler, "_IN_USE", {})
    taken = []
    profile = scheduler.profile
    monkeypatch.setattr(scheduler, "profile", lambda *a, **how: (taken.append(1), profile(*a, tokens=[1, 2, 8], repeats=1, **how))[1])
    model = tiny_target("llama")[0]
    ask = lambda: scheduler.plan_request(model, PromptLookup(max_draft=7), greedy=True)
    def use(planner):
        for _ in range(20): planner.observe(0, 0, planner.plain_ms, drafted=False); planner.observe(7, 6, 9 * planner.round_ms[7], drafted=True)
        assert planner.watch.stale
    use(ask())
    use(ask())
    assert len(taken) == 1                                             # found wrong, but measured a moment ago
    monkeypatch.setattr(scheduler, "REFRESH_S", 0.0)
    ask()
    assert len(taken) == 2
    ask()
    assert len(taken) == 2                                             # the new one has not been found wrong
