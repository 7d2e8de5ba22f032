"""A model with 20 GB of experts decodes inside a memory cgroup of 8 GB: written by streaming, caches dropped, memory recorded.

    python benchmarks/big_moe.py all FOLDER        # root, Linux with cgroup v1; 21 GB of disk, deleted again
    python benchmarks/big_moe.py build FOLDER | measure FOLDER

The model has the shape of Qwen3.5-35B-A3B (40 layers, 256 experts, 8 a token), 4-bit weights in groups of 64, scales in float32, and random values. Its routers are
replaced by random choices, so its routing has NO locality at all: the hit rate is the share of experts that fits, and the speed is a lower bound for this disk.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import mlx_spark  # noqa: F401  (preloads BLAS before mlx)
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_spark.core import save_result
from mlx_spark.expert_file import open_experts, plan_experts, write_experts
from mlx_spark.expert_trace import measure_disk, moe_modules
from mlx_spark.fit import fit, lazy_model

RESULT = Path(__file__).parent / "results" / "big_moe.json"
CGROUP = Path("/sys/fs/cgroup/memory/big_moe")
CONFIG = dict(model_type="qwen3_5_moe", dtype="float32", quantization=dict(group_size=64, bits=4, mode="affine"), text_config=dict(
    model_type="qwen3_5_moe_text", hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=2, head_dim=256, vocab_size=248320,
    num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512, full_attention_interval=4,
    linear_num_value_heads=32, linear_num_key_heads=16, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
    rms_norm_eps=1e-6, tie_word_embeddings=False, max_position_embeddings=262144))
LIMIT_BYTES, BUDGET_BYTES, PROMPT, TOKENS = 8 * 10**9, 45 * 10**8, 8, 36


# --- the file ---------------------------------------------------------------------------------------------------------------

def random_tensor(t, rng) -> mx.array:
    "4-bit codes as random bits; scales and biases such that a weight has mean 0 and the size of an initial one."
    if t.dtype == "uint32": return mx.array(np.frombuffer(rng.bytes(t.bytes), np.uint32).reshape(t.shape))
    inner = t.shape[-1] * 64
    scale = np.full(t.shape, 1 / (4.6 * inner ** .5), np.float32)
    return mx.array(scale if t.name.endswith("scales") else -7.5 * scale)

def build(folder: Path):
    "Write random experts, one layer at a time."
    plan, _ = plan_experts(lazy_model(CONFIG), "expert", model="random weights in the shape of Qwen3.5-35B-A3B")
    def layer(l):
        rng = np.random.default_rng(l)
        return {t.name: random_tensor(t, rng) for t in plan.tensors.values() if t.layer == l}
    start = time.perf_counter()
    m = write_experts(folder, plan, layer)
    seconds = time.perf_counter() - start
    print(f"{m.size / 1e9:.1f} GB in {seconds:.0f} s", file=sys.stderr)
    (folder / "built.json").write_text(json.dumps(dict(bytes=m.size, seconds=seconds, peak_bytes=peak_rss())))

def peak_rss() -> int:
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) * 1024


# --- the run, inside the cgroup ---------------------------------------------------------------------------------------------

class RandomRouter(nn.Module):
    "Scores that depend on nothing: every token chooses anew, all experts alike."
    def __init__(self, n_experts: int):
        super().__init__()
        self.n_experts = n_experts
    def __call__(self, x): return mx.random.normal((*x.shape[:-1], self.n_experts))

def fill(model: nn.Module):
    "Random values for all that is no expert, each array made in its final form."
    for path, m in model.named_modules():
        if isinstance(m, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            inner = m.scales.shape[-1] * m.group_size
            m.weight = mx.random.randint(0, 2**31 - 1, m.weight.shape, mx.int32).view(mx.uint32)
            m.scales = mx.full(m.scales.shape, 1 / (4.6 * inner ** .5), mx.float32)
            m.biases = -3.5 * m.scales
            mx.eval(m.parameters())
    mx.eval(model.parameters())
    mx.clear_cache()

def decode(folder: Path, budget: float, seed: int = 0):
    "Decode greedily under a budget; one line of JSON an event on stdout."
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_spark.mmap_gather import map_experts, memory_now
    from mlx_spark.offload import attach
    say = lambda **event: print(json.dumps({"time": time.time()} | event), flush=True)
    mx.random.seed(seed)
    mx.set_cache_limit(256 << 20)
    say(event="start", **memory_now())
    file = open_experts(folder)
    model = lazy_model(CONFIG)
    mapped = map_experts(model, file)
    for layer in model.layers: layer.mlp.gate = RandomRouter(CONFIG["text_config"]["num_experts"])
    fill(model)
    say(event="loaded", **memory_now())
    offload = attach(model, mapped, budget=budget, policy="lru")
    cache, tokens = make_prompt_cache(model), mx.arange(1000, 1000 + PROMPT)[None]
    for i in range(TOKENS + 1):
        if i == 1: offload.reset_counters()                 # the prompt is over
        start = time.perf_counter()
        logits = model(tokens, cache=cache)[:, -1]
        tokens = mx.argmax(logits, -1, keepdims=True)
        mx.eval(tokens, logits)
        say(event="prefill" if i == 0 else "token", token=tokens.item(), seconds=time.perf_counter() - start, finite=bool(mx.isfinite(logits).all()),
            checksum=float(mx.abs(logits).sum()), **memory_now())
    c = offload.counters
    say(event="end", counters={phase: {k: v for k, v in vars(c[phase]).items()} for phase in c}, budget_bytes=offload.budget_bytes,
        pool_bytes=sum(file.experts(l) * file.expert_bytes[l] for l in file.layers), kv_bytes=sum(x.nbytes for x in cache))


# --- around it --------------------------------------------------------------------------------------------------------------

def stat(pid: int) -> dict:
    "What the kernel says about the process and its cgroup, bytes."
    status = {l.split(":")[0]: int(l.split()[1]) * 1024 for l in open(f"/proc/{pid}/status") if l.startswith(("RssAnon", "RssFile"))}
    memory = dict(l.split() for l in (CGROUP / "memory.stat").read_text().splitlines())
    pressure = Path("/proc/pressure/memory").read_text().split()[1] if Path("/proc/pressure/memory").exists() else "avg10=nan"
    return dict(rss_anon=status.get("RssAnon", 0), rss_file=status.get("RssFile", 0), usage=int((CGROUP / "memory.usage_in_bytes").read_text()),
                cache=int(memory["cache"]), rss=int(memory["rss"]), failcnt=int((CGROUP / "memory.failcnt").read_text()), pressure=float(pressure.split("=")[1]))

def confined(folder: Path, limit: int, budget: int) -> dict:
    "Run `decode` in a fresh cgroup of `limit` bytes after dropping the caches; its events and a sample of memory every 0.25 s."
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")
    if CGROUP.exists(): CGROUP.rmdir()
    CGROUP.mkdir()
    (CGROUP / "memory.limit_in_bytes").write_text(str(limit))
    child = subprocess.Popen([sys.executable, __file__, "decode", str(folder), "--budget", str(budget)], stdout=subprocess.PIPE, text=True,
                             preexec_fn=lambda: (CGROUP / "cgroup.procs").write_text(str(os.getpid())))
    samples, done = [], threading.Event()
    def watch():
        while not done.wait(.25):
            try: samples.append(dict(time=time.time()) | stat(child.pid))
            except (FileNotFoundError, ProcessLookupError): return
    watcher = threading.Thread(target=watch)
    watcher.start()
    events = [json.loads(line) for line in child.stdout if line.startswith("{")]
    done.set()
    watcher.join()
    peak, code = int((CGROUP / "memory.max_usage_in_bytes").read_text()), child.wait()
    (CGROUP / "memory.force_empty").write_text("0")
    CGROUP.rmdir()
    if code: raise SystemExit(f"the run inside {limit / 1e9:g} GB ended with {code}; the last event was {events[-1:]}")
    return dict(limit_bytes=limit, budget_bytes=budget, events=events, memory=samples, max_usage_bytes=peak)

def measure(folder: Path):
    "Two runs of the same tokens, in 8 GB and in less, and what was predicted."
    disk = measure_disk(folder)
    runs = [confined(folder, limit, budget) for limit, budget in ((LIMIT_BYTES, BUDGET_BYTES), (6 * 10**9, 25 * 10**8))]
    tokens = [[(e["token"], e["checksum"]) for e in r["events"] if "token" in e] for r in runs]
    seconds = [[e["seconds"] for e in r["events"] if e["event"] == "token"] for r in runs]
    a = fit(CONFIG, LIMIT_BYTES, usable=1, context=PROMPT + TOKENS, chunk=PROMPT, weight_rate=1e9, disk_rate=disk)
    built = json.loads((folder / "built.json").read_text())
    data = dict(
        what="random weights in the shape of Qwen3.5-35B-A3B, 4 bits; random routing, which has no locality", file_bytes=built["bytes"], build=built,
        layout=open_experts(folder).manifest.layout, disk_bytes_per_s=disk, config=CONFIG, prompt_tokens=PROMPT, decoded_tokens=TOKENS,
        runs=[{k: r[k] for k in ("limit_bytes", "budget_bytes", "max_usage_bytes")} | dict(
            tokens_per_s=len(s) / sum(s), seconds=s, end=r["events"][-1], loaded=next(e for e in r["events"] if e["event"] == "loaded"))
            for r, s in zip(runs, seconds)],
        same_tokens=tokens[0] == tokens[1], finite=all(e["finite"] for r in runs for e in r["events"] if "finite" in e),
        predicted={k: a[k] for k in ("weight_bytes", "expert_bytes", "other_bytes", "cycle_bytes", "active_bytes", "kv_bytes", "verdict")})
    save_result(RESULT, data, seeds=[0], samples={f"{r['limit_bytes'] / 1e9:g} GB": dict(memory_bytes=r["memory"], events=r["events"]) for r in runs})
    for r in data["runs"]: print(f"{r['limit_bytes'] / 1e9:g} GB: {r['tokens_per_s']:.2f} tokens/s, most used {r['max_usage_bytes'] / 1e9:.2f} GB", file=sys.stderr)
    print(f"the same tokens: {data['same_tokens']}", file=sys.stderr)

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("build", "measure", "all", "decode"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--budget", type=float, default=BUDGET_BYTES)
    args = parser.parse_args()
    if args.command == "decode": return decode(args.folder, args.budget)
    try:
        if args.command in ("build", "all"): build(args.folder)
        if args.command in ("measure", "all"): measure(args.folder)
    finally:
        if args.command == "all": shutil.rmtree(args.folder, ignore_errors=True)

if __name__ == "__main__": main()
