"""Reference hit counts for two policies, by definitions that never simulate a cache -> replay.json

LRU by reuse distance: an expert is hit if the distinct experts used since its last use, itself included, fit the budget, or if its last use was the call just before.
Belady by packing: each pair of successive uses is an interval that wants one slot at every call strictly between them; the most intervals such that
no call has more than its own free slots are found by dropping, wherever a call is over-full, the interval that ends last. Sizes are equal here.

python goldens/residency/make_residency.py     (numpy only; knows nothing of mlx_spark)
"""
import json
from pathlib import Path

import numpy as np

def stream(seed, n_calls=240, n_layers=4, n_experts=12):
    rng = np.random.default_rng(seed)
    taste = rng.dirichlet(np.full(n_experts, .4), n_layers) + 1e-3
    taste /= taste.sum(1, keepdims=True)
    return [(i % n_layers, rng.choice(n_experts, rng.integers(1, 5), replace=False, p=taste[i % n_layers]).tolist()) for i in range(n_calls)]

def lru_hits(calls, budget, size):
    order = [(i, (l, e)) for i, (l, es) in enumerate(calls) for e in es]
    last, n = {}, 0
    for at, (i, key) in enumerate(order):
        if key in last:
            before = max([j for j in range(at) if order[j][0] < i], default=-1)
            since = {k for _, k in order[last[key]:before + 1]}
            n += sum(size[l] for l, _ in since) <= budget or order[last[key]][0] == i - 1
        last[key] = at
    return n

def most_hits(calls, budget):
    uses = {}
    for i, (l, es) in enumerate(calls):
        for e in es: uses.setdefault((l, e), []).append(i)
    spans = [(a, b) for at in uses.values() for a, b in zip(at, at[1:])]
    kept = set(range(len(spans)))
    for i, (_, es) in enumerate(calls):
        over = sorted((k for k in kept if spans[k][0] < i < spans[k][1]), key=lambda k: spans[k][1])
        kept -= set(over[max(budget - len(es), 0):])
    return len(kept)

if __name__ == "__main__":
    cases = []
    for seed in range(4):
        calls, sizes = stream(seed), {0: 3, 1: 2, 2: 3, 3: 2}
        for budget in (2, 5, 9, 14, 20, 30, 48):
            cases.append(dict(seed=seed, budget=budget, lru=lru_hits(calls, budget, dict.fromkeys(range(4), 1)), lru_unequal=lru_hits(calls, 2.5 * budget, sizes), belady=most_hits(calls, budget)))
    data = dict(streams=[stream(s) for s in range(4)], sizes=[3, 2, 3, 2], cases=cases)
    (Path(__file__).parent / "replay.json").write_text(json.dumps(data) + "\n")
