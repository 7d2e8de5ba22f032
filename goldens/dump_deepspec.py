"""Trace DeepSpec's own decoding loop, in the format of goldens/deepspec/traces (one JSON line a prompt).

It runs in the REFERENCE's environment (torch), never in ours, and imports nothing of mlx_spark:

    git clone https://github.com/deepseek-ai/DeepSpec && git -C DeepSpec checkout afdfa7c
    python -m venv dsenv && dsenv/bin/pip install -r DeepSpec/requirements.txt   # torch 2.9.1, transformers
    dsenv/bin/python goldens/dump_deepspec.py --deepspec DeepSpec --target Qwen/Qwen3-4B \
        --drafter deepseek-ai/dspark_qwen3_4b_block7 --data prompts.jsonl --n 8 --out trace.jsonl
    mlx_spark oracle --fixture trace.jsonl --target Qwen/Qwen3-4B --draft-model deepseek-ai/dspark_qwen3_4b_block7

--data: JSON lines {"prompt_ids": [...]}, {"turns": [...]} or {"prompt": "..."}, or one plain prompt a line.

Written against commit afdfa7c, from its documented behaviour. Of the checkout it needs two names: the drafter class in the
checkpoint's `architectures`, and the function `generate_decoding_sample`; both are searched for. The rounds are rebuilt from
forward hooks on modules that the checkpoint's tensor names fix (fc, lm_head, markov_head.markov_w2, confidence_head) and on
the target. Parameters of the function, or attributes of `self` if it is a method, are bound by name; a name this script does
not know is reported, and `--bind NAME=VALUE` supplies it (VALUE: a Python literal, or target, drafter, tokenizer, input_ids).
A pass that does not look like the documented loop stops the script. This project's tests have neither torch nor DeepSpec:
they test the record building. Above temperature 0 the draws of the reference are not recorded, so such a trace serves
`--acceptance-only`.
"""
import argparse
import ast
import importlib
import inspect
import json
import math
import sys
from pathlib import Path

COMMIT = "afdfa7c"
LOOP = "generate_decoding_sample"


# ---- rebuilding rounds: plain Python ----

def leading(flags):
    "Length of the leading run of true values."
    return next((i for i, flag in enumerate(flags) if not flag), len(flags))


def build_rounds(passes, *, gamma, stop_ids=(), greedy=True, output_ids=()):
    """Rounds of a trace from the target passes in order.

    A pass is a dict: input_ids, argmax and margin (one per row), and what the drafter did before it: ctx_len (None in
    prefill), draft_tokens, draft_margin, confidence_logits (None where unknown)."""
    prefill = leading([p["ctx_len"] is None for p in passes])
    if prefill == 0: raise ValueError("no target pass came before the first drafter pass: was the prefill hooked?")
    start = sum(len(p["input_ids"]) for p in passes[:prefill])
    due, rounds, draft_cache_len = start, [], 0          # due: context rows the next drafter pass must bring
    for i, p in enumerate(passes[prefill:]):
        anchor, *proposed = p["input_ids"]
        following = passes[prefill + i + 1] if prefill + i + 1 < len(passes) else None
        if p["ctx_len"] != due:
            raise ValueError(f"round {i}: the drafter got {p['ctx_len']} context rows, the loop owes it {due}")
        if i and greedy and anchor != rounds[-1]["next_token"]:
            raise ValueError(f"round {i}: anchor {anchor}, but round {i - 1} ended in {rounds[-1]['next_token']}")
        if greedy and p["draft_tokens"] and p["draft_tokens"][:len(proposed)] != proposed:
            raise ValueError(f"round {i}: the target verifies {proposed}, the drafter's logits say {p['draft_tokens']}")
        if greedy: a = leading([d == t for d, t in zip(proposed, p["argmax"])])
        elif following: a = following["ctx_len"] - 1
        else: a = leading([d == t for d, t in zip(proposed, output_ids[start + 1:])])
        stop = next((k for k, d in enumerate(proposed[:a]) if d in stop_ids), None)
        effective = len(proposed) if stop is None else stop + 1
        a = a if stop is None else stop + 1
        after = p["argmax"][a] if greedy else following["input_ids"][0] if following else None
        rounds.append({
            "round": i, "start": start, "anchor": anchor,
            "draft_cache_len_before": draft_cache_len, "ctx_len": p["ctx_len"],
            "draft_cache_len_after": draft_cache_len + p["ctx_len"],
            "draft_tokens": p["draft_tokens"] or proposed, "confidence_logits": p["confidence_logits"],
            "proposal_length": len(proposed), "effective_proposal_length": effective, "target_argmax": p["argmax"],
            "accepted_draft_tokens": a, "next_token": after,
            "terminated_by_stop_token": stop is not None,
            "committed_tokens": proposed[:a] + ([] if stop is not None or after is None else [after]),
            "min_target_margin": min(p["margin"]), "min_draft_margin": p["draft_margin"]})
        if len(proposed) > gamma: raise ValueError(f"round {i}: {len(proposed)} tokens proposed, the block has {gamma}")
        draft_cache_len, due, start = draft_cache_len + p["ctx_len"], a + 1, start + a + 1
    return rounds


def build_row(passes, prompt_ids, output_ids, greedy_new_tokens, *, gamma, stop_ids, **settings):
    "One line of a trace file."
    greedy = settings["temperature"] < 1e-5
    rounds = build_rounds(passes, gamma=gamma, stop_ids=stop_ids or (), greedy=greedy, output_ids=output_ids)
    n_in = len(prompt_ids)
    if output_ids[:n_in] != prompt_ids: raise ValueError("the reference's output does not begin with the prompt")
    least = lambda values: min((v for v in values if v is not None), default=None)
    return {
        **settings, "prompt_ids": prompt_ids, "stop_token_ids": list(stop_ids) if stop_ids else None, "rounds": rounds,
        "output_ids": output_ids, "num_input_tokens": n_in, "num_output_tokens": len(output_ids) - n_in,
        "acceptance_lengths": [r["accepted_draft_tokens"] + (not r["terminated_by_stop_token"]) for r in rounds],
        "proposal_lengths": [r["effective_proposal_length"] for r in rounds],
        "accepted_draft_lengths": [r["accepted_draft_tokens"] for r in rounds],
        "target_greedy_new_tokens": greedy_new_tokens,
        "lossless": None if greedy_new_tokens is None else output_ids[n_in:] == greedy_new_tokens,
        "min_target_margin": least(r["min_target_margin"] for r in rounds),
        "min_draft_margin": least(r["min_draft_margin"] for r in rounds),
        "min_threshold_margin": threshold_margin(rounds, settings["confidence_threshold"])}


def threshold_margin(rounds, threshold):
    "Least distance of a confidence from the threshold; None where none was tested."
    if threshold <= 0: return None
    confidences = [1 / (1 + math.exp(-c)) for r in rounds for c in r["confidence_logits"] or []]
    return min((abs(c - threshold) for c in confidences), default=None)


# ---- finding and calling the reference ----

def find_definition(root, name):
    "(module, qualified name) of the function, method or class `name` in the checkout at `root`."
    found = []
    for path in sorted(Path(root).rglob("*.py")):
        if name not in (text := path.read_text(errors="replace")): continue
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(text).body:
            if getattr(node, "name", None) == name: found.append((module, name))
            for inner in getattr(node, "body", []) if isinstance(node, ast.ClassDef) else []:
                if getattr(inner, "name", None) == name: found.append((module, f"{node.name}.{name}"))
    if len(found) != 1:
        sys.exit(f"{root}: {len(found)} definitions of {name} {found}, wanted 1; is this DeepSpec at commit {COMMIT}?")
    return found[0]


PARAMETERS = {
    "input_ids": ("input_ids", "prompt_ids"), "max_new_tokens": ("max_new", "max_tokens"), "stop_token_ids": ("stop", "eos"),
    "confidence_threshold": ("threshold",), "temperature": ("temp",), "tokenizer": ("tokenizer",), "block_size": ("block_size",),
    "mask_token_id": ("mask_token",), "device": ("device",)}


def value_for(name, values):
    "The value that a parameter or attribute called `name` stands for; KeyError if this script does not know it."
    low = name.lower()
    if name in values: return values[name]
    if "draft" in low and "model" in low or low in ("drafter", "draft", "dspark"): return values["drafter"]
    if "target" in low and "model" in low or low in ("model", "target", "target_lm"): return values["target"]
    for key, parts in PARAMETERS.items():
        if any(part in low for part in parts): return values[key]
    raise KeyError(name)


class StandIn:
    "The `self` of a method we cannot construct: its own methods, and for data whatever `value_for` knows."
    def __init__(self, cls, values): self.__dict__.update(_cls=cls, _values=values)

    def __getattr__(self, name):
        own = inspect.getattr_static(self._cls, name, None)
        if hasattr(own, "__get__"): return own.__get__(self, self._cls)
        try: return value_for(name, self._values)
        except KeyError:
            if own is not None: return own
            raise AttributeError(f"{LOOP} reads self.{name}, unknown to this script: add --bind {name}=VALUE") from None


def call_reference(loop, cls, values):
    "Call the reference's loop, each parameter bound by its name."
    bound = {}
    if cls and inspect.isfunction(inspect.getattr_static(cls, LOOP)): loop = loop.__get__(StandIn(cls, values), cls)
    for name, p in inspect.signature(loop).parameters.items():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD): continue
        try: bound[name] = value_for(name, values)
        except KeyError:
            if p.default is not p.empty: continue
            sys.exit(f"{LOOP}{inspect.signature(loop)}: no value for {name}; add --bind {name}=VALUE")
    return loop(**bound)


def find_ids(result, prompt_ids):
    "The one token list in whatever the loop returned that begins with the prompt."
    if hasattr(result, "tolist"): result = result.tolist()
    if isinstance(result, list) and len(result) == 1 and isinstance(result[0], list): result = result[0]
    if isinstance(result, list) and result[:len(prompt_ids)] == prompt_ids: return [int(t) for t in result]
    if isinstance(result, dict): parts = result.values()
    elif isinstance(result, (tuple, list)): parts = result
    else: parts = vars(result).values() if hasattr(result, "__dict__") else ()
    return next((ids for part in parts if (ids := find_ids(part, prompt_ids))), None)


# ---- hooks: torch from here on ----

class Recorder:
    "Forward hooks that collect the passes of `build_rounds`; `remove()` takes them off."

    def __init__(self, target, drafter):
        self.passes, self.softcap = [], getattr(drafter.config, "final_logit_softcapping", None)
        self.clear()
        add = lambda module, hook: module.register_forward_hook(hook, with_kwargs=True)
        self.handles = [add(target, self.on_target), add(drafter.fc, self.on_context), add(drafter.lm_head, self.on_base)]
        markov, confidence = (getattr(drafter, name, None) for name in ("markov_head", "confidence_head"))
        if markov is not None: self.handles.append(add(markov.markov_w2, self.on_bias))
        if confidence is not None: self.handles.append(add(confidence, self.on_confidence))

    def clear(self): self.ctx_len, self.base, self.bias, self.confidence = None, [], [], None

    def remove(self):
        for handle in self.handles: handle.remove()

    def on_context(self, module, args, kwargs, output): self.ctx_len = output.shape[-2]

    def on_base(self, module, args, kwargs, output): self.base.append(output.detach().float().flatten(0, -2))

    def on_bias(self, module, args, kwargs, output): self.bias.append(output.detach().float().flatten(0, -2))

    def on_confidence(self, module, args, kwargs, output):
        output = output[0] if isinstance(output, tuple) else output
        self.confidence = output.detach().float().flatten().tolist()

    def on_target(self, module, args, kwargs, output):
        ids = kwargs.get("input_ids", args[0] if args else None)
        argmax, margin = best_two(output.logits[0].detach().float())
        draft_tokens, draft_margin = self.draft_top()
        self.passes.append({
            "input_ids": ids[0].tolist(), "argmax": argmax, "margin": margin, "ctx_len": self.ctx_len,
            "confidence_logits": self.confidence, "draft_tokens": draft_tokens, "draft_margin": draft_margin})
        self.clear()

    def draft_top(self):
        "Tokens and least margin of the block: capped base logits plus, with a sequential head, its biases in order."
        import torch
        if not self.base: return None, None
        logits = torch.cat(self.base)
        if self.softcap: logits = self.softcap * torch.tanh(logits / self.softcap)
        if self.bias: logits = logits + torch.cat(self.bias)[:len(logits)]
        tokens, margin = best_two(logits)
        return tokens, min(margin)


def best_two(logits):
    "Argmax of each row, and its lead over the second."
    top = logits.topk(2, dim=-1)
    return top.indices[:, 0].tolist(), (top.values[:, 0] - top.values[:, 1]).tolist()


def read_prompts(path, n, tokenizer):
    "[(prompt ids, came as text)] of the first `n` lines."
    prompts = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        if not line.strip(): continue
        row = json.loads(line) if line.lstrip().startswith("{") else {"prompt": line}
        if "prompt_ids" in row: prompts.append((row["prompt_ids"], False)); continue
        text = row["turns"][0] if "turns" in row else row["prompt"]
        if tokenizer is None: sys.exit(f"{path}: text prompts need a tokenizer beside the target")
        turn = [{"role": "user", "content": text}]
        shown = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False, enable_thinking=False)
        prompts.append((tokenizer(shown, add_special_tokens=False)["input_ids"], True))
    return prompts[:n]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--deepspec", required=True, help="checkout of DeepSpec")
    add("--target", required=True)
    add("--drafter", required=True)
    add("--data", required=True, help="prompts, see above")
    add("--n", type=int, default=8, help="prompts to run")
    add("--max-new-tokens", type=int, default=128)
    add("--temperature", type=float, default=0.0)
    add("--confidence-threshold", type=float, default=0.0)
    add("--out", required=True, help="trace to write")
    add("--dtype", default="float32", help="float32 compares number for number, bfloat16 as acceptance only")
    add("--device", default="cpu")
    add("--stop-token-ids", help="1,2,...; default: the target's own for text prompts, none for prompt_ids")
    add("--bind", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    root = Path(args.deepspec).resolve()
    sys.path.insert(0, str(root))
    dtype = getattr(torch, args.dtype)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(args.device).eval()
    module, name = find_definition(root, AutoConfig.from_pretrained(args.drafter).architectures[0])
    drafter_class = getattr(importlib.import_module(module), name)
    drafter = drafter_class.from_pretrained(args.drafter, dtype=dtype).to(args.device).eval()
    try: tokenizer = AutoTokenizer.from_pretrained(args.target)
    except (OSError, ValueError, KeyError): tokenizer = None
    module, name = find_definition(root, LOOP)
    loop = importlib.import_module(module)
    cls = getattr(loop, name.split(".")[0]) if "." in name else None
    loop = getattr(cls or loop, LOOP)

    eos = target.generation_config.eos_token_id
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    settings = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature,
                "confidence_threshold": args.confidence_threshold}
    values = settings | {
        "target": target, "drafter": drafter, "tokenizer": tokenizer, "device": torch.device(args.device),
        "block_size": drafter.config.block_size, "mask_token_id": drafter.config.mask_token_id}
    lines = []
    for index, (prompt_ids, is_text) in enumerate(read_prompts(args.data, args.n, tokenizer)):
        stop_ids = [int(t) for t in args.stop_token_ids.split(",")] if args.stop_token_ids else eos if is_text else []
        values |= {"input_ids": torch.tensor([prompt_ids], device=args.device), "stop_token_ids": stop_ids or None}
        for text in args.bind:
            key, _, value = text.partition("=")
            values[key] = values[value] if value in values else ast.literal_eval(value)
        recorder = Recorder(target, drafter)
        with torch.no_grad(): result = call_reference(loop, cls, values)
        recorder.remove()
        output_ids = find_ids(result, prompt_ids)
        if output_ids is None: sys.exit(f"no token list in what {LOOP} returned begins with the prompt: {type(result)}")
        plain = None
        if args.temperature < 1e-5:
            with torch.no_grad():
                plain = target.generate(values["input_ids"], do_sample=False, max_new_tokens=args.max_new_tokens,
                                        eos_token_id=stop_ids or None, pad_token_id=0)[0, len(prompt_ids):].tolist()
        row = build_row(
            recorder.passes, prompt_ids, output_ids, plain, gamma=drafter.config.block_size, stop_ids=stop_ids,
            case=Path(args.out).stem, drafter=Path(args.drafter).name, target=Path(args.target).name, prompt_index=index, **settings)
        lines.append(json.dumps(row))
        done = f"{len(row['rounds'])} rounds, {row['num_output_tokens']} tokens, lossless {row['lossless']}"
        print(f"prompt {index}: {done}", file=sys.stderr)
    Path(args.out).write_text("\n".join(lines) + "\n")


if __name__ == "__main__": main()
