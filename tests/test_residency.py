"Residency policies under random streams, and the command on recorded and imported traces."
import argparse
import json
import math
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mlx_spark.expert_trace import TraceWriter, read_trace, write_csv
from mlx_spark.residency import (Belady, LRU, POLICIES, Recall, add_arguments, budget_for, compare, lru_zero_bytes, make_policy, replay, router_calls, run,
                                 run_calls, synthetic_trace, token_cycle_bytes)

MiB = 1 << 20
KEEP_BUDGET = [name for name in POLICIES if name not in ("layer", "layerlfu")]
E = 6

calls_of = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, E - 1), min_size=1, max_size=5, unique=True)), min_size=1, max_size=50)
sizes_of = st.sampled_from([{0: 1, 1: 1, 2: 1}, {0: 2, 1: 3, 2: 2}])

def policy_of(name, budget, sizes, calls):
    profile = {(l, e): 1 + (l + e) % 3 for l in sizes for e in range(E)}
    return make_policy(name, budget, sizes, n_experts=E, profile=profile, future=calls, seed=1)

@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40, deadline=None)
@given(calls=calls_of, sizes=sizes_of, budget=st.integers(1, 45))
def test_bookkeeping(name, calls, sizes, budget):
    "What a policy says it reads and drops adds up to what it holds, in every call."
    policy, resident = policy_of(name, budget, sizes, calls), set()
    for layer, experts in calls:
        keys, need = {(layer, e) for e in experts}, len(experts) * sizes[layer]
        missing, gone = policy.touch(layer, experts)
        assert set(missing) == keys - resident and len(set(missing)) == len(missing)   # hits + misses = lookups
        resident |= keys
        assert len(set(gone)) == len(gone) and set(gone) <= resident - keys               # never what this call touched
        resident -= set(gone)
        used = sum(sizes[l] for l, _ in resident)
        assert policy.used_bytes == used and all(((l, e) in policy) == ((l, e) in resident) for l in sizes for e in range(E))
        if name in KEEP_BUDGET: assert used <= max(budget, need)                          # only one call's own need may exceed the budget
        else: assert sum(sizes[l] for l, _ in resident if l == layer) <= max(budget / 3, need)

@pytest.mark.parametrize("name", [n for n in KEEP_BUDGET if n != "belady"])
@settings(max_examples=40, deadline=None)
@given(calls=calls_of, budget=st.integers(1, 18))
def test_belady_is_a_bound_for_equal_sizes(name, calls, budget):
    "In total hits, on atomic calls, against every rule that keeps to the budget."
    sizes = {0: 1, 1: 1, 2: 1}
    hits = lambda policy: sum(len(e) - len(policy.touch(l, e)[0]) for l, e in calls)
    assert hits(policy_of(name, budget, sizes, calls)) <= hits(Belady(budget, sizes, calls))

def test_belady_is_no_bound_for_decode_alone():
    "The bound is on the total: a rule with no more hits may have them later."
    calls = [(0, [0]), (0, [1]), (0, [2]), (0, [1]), (0, [0])]
    best = Belady(2, {0: 1}, calls)
    late = [len(e) - len(best.touch(l, e)[0]) for l, e in calls]
    assert late == [0, 0, 0, 1, 0]                                                        # 0 is given up for 1, which comes first
    other = LRU(2, {0: 1})
    other.victim = lambda keep: next((k for k in other.resident if k not in keep and k != (0, 0)), None)
    assert [len(e) - len(other.touch(l, e)[0]) for l, e in calls] == [0, 0, 0, 0, 1]

@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=6), top_k=st.integers(1, 4), below=st.floats(0.02, 0.999), seed=st.integers(0, 99))
def test_lru_scores_zero_below_the_cycle(sizes, top_k, below, seed):
    "Whatever single tokens ask for."
    sizes, rng = dict(enumerate(sizes)), random.Random(seed)
    zero = lru_zero_bytes(sizes, top_k)
    lru = LRU(below * zero, sizes)
    for _ in range(20):
        for layer in sizes:
            experts = rng.sample(range(8), top_k)
            assert len(lru.touch(layer, experts)[0]) == top_k
    steady, at = LRU(zero, sizes), sizes[max(sizes, key=sizes.get)]
    hits = sum(top_k - len(steady.touch(layer, range(top_k))[0]) for _ in range(3) for layer in sizes)
    assert hits > 0                                                                       # and the bound is sharp
    assert token_cycle_bytes(sizes, top_k) - zero == (top_k - 1) * at

@pytest.mark.parametrize("name", POLICIES)
def test_same_again(name):
    trace = synthetic_trace(n_tokens=40)
    a, b = replay(trace, name, 60 * MiB), replay(trace, name, 60 * MiB)
    assert (a.hits, a.read_bytes, a.peak_bytes) == (b.hits, b.read_bytes, b.peak_bytes)
    assert np.array_equal(a.hits_by_step, b.hits_by_step)

@pytest.mark.parametrize("name", POLICIES)
def test_room_for_all(name):
    "With room for everything only first touches miss."
    calls = router_calls(synthetic_trace(n_tokens=40))
    r = replay(calls, name, calls.pool_bytes)
    assert tuple(n - h for n, h in zip(r.lookups, r.hits)) == r.first_touches

def test_lower_budget_at_run_time():
    "A runtime may lower the budget between calls: evict() says what goes."
    calls = router_calls(synthetic_trace(n_tokens=20))
    for name in KEEP_BUDGET:
        policy = make_policy(name, 80 * MiB, calls.expert_bytes, n_experts=calls.n_experts, profile=calls.profile, future=calls.pairs())
        for layer, experts in calls.pairs()[:100]: policy.touch(layer, experts)
        held = policy.used_bytes
        gone = policy.evict(limit_bytes=40 * MiB)
        assert held - policy.used_bytes == sum(calls.expert_bytes[l] for l, _ in gone) and policy.used_bytes <= 40 * MiB, name
        assert not any(key in policy for key in gone)

def test_layers_need_not_be_consecutive():
    sizes = {1: 3, 5: 2, 9: 4}
    calls = [(layer, [i % 7, (i * 3 + 1) % 7][: 1 + (i % 7 != (i * 3 + 1) % 7)]) for i in range(60) for layer in sizes]
    for name in POLICIES:
        policy = make_policy(name, 20, sizes, n_experts=7, profile={}, future=calls)
        for layer, experts in calls: policy.touch(layer, experts)
        assert policy.used_bytes <= 20 or name in ("layer", "layerlfu")

def test_recall_on_routing_without_locality():
    "Popularity that never changes is what LFU assumes: recall gains on its own past and on LRU there, but not on LFU."
    calls = router_calls(synthetic_trace(n_tokens=120, seed=3))
    hit = {n: replay(calls, n, 100 * MiB).hit_pct_decode for n in ("lru", "lfu", "hazard", "recall", "belady")}
    assert hit["belady"] > hit["lfu"] > hit["recall"] > hit["hazard"] > hit["lru"]

def test_recall_forgets_in_halves():
    "A full memory drops its older half and goes on with the right successors."
    calls = router_calls(synthetic_trace(n_tokens=70, n_layers=3, n_experts=8, top_k=2))
    policy = Recall(10 * MiB, calls.expert_bytes, n_experts=8, memory=16)
    rows = []
    for layer, experts in calls.pairs():
        before = policy.now
        policy.touch(layer, experts)
        if layer == 0: rows.append(set())
        rows[-1] |= {(layer, e) for e in experts}
        assert policy.now < 16 and len(policy.tokens) == policy.now and policy.now - before in (0, 1, -7)
    for back in range(1, policy.now + 1):
        assert {(i // 8, i % 8) for i in policy.tokens[-back].tolist()} == rows[-1 - back]

# the command ----------------------------------------------------------------------------------------------------------

def cli(*argv):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(a) for a in argv]))

@pytest.fixture(scope="module")
def trace_files(tmp_path_factory):
    folder, trace = tmp_path_factory.mktemp("traces"), synthetic_trace(n_tokens=40)
    with TraceWriter(folder / "folder", trace.meta) as writer: writer.append(trace)
    for name in ("t.csv", "t.csv.gz"): write_csv(trace, folder / name)
    return [folder / "folder", folder / "t.csv", folder / "t.csv.gz"]

def test_command_reads_every_kind_of_trace(trace_files, capsys):
    answers = []
    for path in trace_files:
        assert cli(path, "--policies", "lru,lfu,layer,layerlfu,belady", "--budgets", "50MiB,100MiB", "--json") == 0
        out, err = capsys.readouterr()
        assert out.count("\n") == 1 and "token cycle 32 MiB" in err
        answers.append(json.loads(out))
        assert not math.isnan(answers[-1]["rows"][0]["hit_pct_cum"])
    assert answers[0] == answers[1] == answers[2]
    rows = answers[0]["rows"]
    assert [r["policy"] for r in rows] == ["lru", "lfu", "layer", "layerlfu", "belady"] * 2 and {r["budget_mib"] for r in rows} == {50, 100}
    assert {"policy", "budget_mib", "hit_pct_cum", "hit_pct_decode", "read_mib"} <= rows[0].keys()

def test_command_shows_the_cliff_and_says_what_to_do(trace_files, capsys):
    assert cli(trace_files[0], "--policies", "lru", "--budgets", "10MiB", "--json") == 0
    out, err = capsys.readouterr()
    cliff, other = json.loads(out)["rows"]
    assert cliff["hit_pct_decode"] == 0 and other["instead_of"] == "lru" and other["hit_pct_decode"] > 0
    assert "below one token cycle of 32 MiB" in err
    with pytest.raises(ValueError, match="below one token cycle"): cli(trace_files[0], "--policies", "lru", "--budgets", "10MiB", "--below-cycle", "refuse")
    capsys.readouterr()
    assert cli(trace_files[0], "--policies", "lru", "--budgets", "10MiB", "--below-cycle", "show", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 1

def test_command_recommends_a_budget(trace_files, capsys):
    assert cli(trace_files[0], "--policies", "lru,belady", "--budgets", "30%", "--want-hit", 60, "--json") == 0
    out, err = capsys.readouterr()
    best, other = json.loads(out)["recommended"]
    assert best["policy"] == "belady" and best["budget_mib"] < other["budget_mib"] and best["hit_pct_decode"] >= 60
    assert "for 60 % in decode belady needs" in err
    assert cli(trace_files[0], "--policies", "lru", "--budgets", "30%", "--want-hit", 100) == 0
    assert "not reachable" in capsys.readouterr().out

def test_command_pins_another_trace(trace_files, capsys):
    assert cli(trace_files[0], "--policies", "pinned", "--budgets", "60MiB", "--profile", trace_files[1], "--json") == 0
    own = json.loads(capsys.readouterr().out)["rows"][0]["hit_pct_decode"]
    assert cli(trace_files[0], "--policies", "pinned", "--budgets", "60MiB", "--json") == 0
    assert own != json.loads(capsys.readouterr().out)["rows"][0]["hit_pct_decode"]

@pytest.mark.parametrize("options, found", [
    (("--policies", "lru,mru"), "no policy 'mru'"), (("--budgets", "500"), "'500'"), (("--want-hit", "101"), "0..100"),
    (("--profile", "/nowhere"), "no trace at /nowhere"), (("--policies", " ,"), "names no policy")])
def test_command_refuses(trace_files, options, found):
    with pytest.raises((ValueError, FileNotFoundError), match=found): cli(trace_files[0], "--budgets", "50MiB", *options)

def test_profile_of_another_model_is_refused(trace_files, tmp_path):
    (tmp_path / "other.csv").write_text("phase,step,layer,expert\n0,0,0,3\n1,1,0,4\n")
    with pytest.raises(ValueError): cli(trace_files[0], "--policies", "pinned", "--budgets", "60MiB", "--profile", tmp_path / "other.csv")

def test_no_sizes_no_budget(tmp_path):
    (tmp_path / "bare.csv").write_text("phase,step,layer,expert\n1,0,0,3\n1,1,0,4\n")
    with pytest.raises(ValueError, match="needs the size of an expert"): router_calls(read_trace(tmp_path / "bare.csv"))

def test_budget_for_is_tight():
    calls = router_calls(synthetic_trace(n_tokens=60))
    r = budget_for(calls, "lru", 50, step_bytes=MiB)
    assert r.hit_pct_decode >= 50 > run_calls(calls, LRU(r.budget_bytes - MiB, calls.expert_bytes)).hit_pct_decode

def test_million_lookups_are_quick():
    "A guard against quadratic slips; the measured figure is in benchmarks/results/replay_speed.json."
    calls = router_calls(synthetic_trace(n_tokens=300))
    start, n = time.process_time(), 0
    while n < 200_000: n += sum(run_calls(calls, LRU(100 * MiB, calls.expert_bytes)).lookups)
    assert time.process_time() - start < 5

def test_remark_on_who_exceeds_the_budget():
    _, remarks = compare(router_calls(synthetic_trace(n_tokens=20)), ["layer", "layer-strict"], [10 * MiB])
    assert remarks == ["layer holds more than the budget it was given (see peak)"]
