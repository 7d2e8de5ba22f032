"""The drafter over every head, variant and way of running it; what the notebook shows once, here as a matrix."""
import json
from itertools import product
from pathlib import Path

import mlx_spark  # noqa: F401  (loads the BLAS before mlx)
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlx_spark.dspark import (
    DSparkConfig, DSparkDrafter, footprint, keep_rows, load_drafter, reduce_vocabulary, save_drafter)
from mlx_spark.targets import parts, tiny_target
from mlx_spark.verify import Sampling

GOLDENS = Path(__file__).parent.parent / "goldens" / "deepspec"
NAMES = sorted(p.name for p in (GOLDENS / "drafters").iterdir())
REAL_ROUNDS = [n for n in NAMES if (GOLDENS / "forward" / f"{n}__rounds_prompt2.safetensors").exists()]
HEADS = ("none", "vanilla", "gated", "rnn")


@pytest.fixture(scope="module")
def targets():
    return {family: load_model(GOLDENS / "targets" / folder)[0] for family, folder in (("q3", "qwen3_tiny"), ("g4", "gemma4_tiny"))}


def drafter_for(model, head="vanilla", *, variant="qwen3", d2t=None, seed=0, **changes):
    dims = parts(model).dims
    fields = dict(
        variant=variant, vocab_size=dims.vocab_size, hidden_size=dims.hidden_size, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, rope_theta=1e4, block_size=5, mask_token_id=7, target_layer_ids=(-1, 1, dims.n_layers - 1),
        num_target_layers=dims.n_layers, markov_rank=0 if head == "none" else 32, markov_head_type=None if head == "none" else head,
        enable_confidence_head=True, confidence_head_with_markov=head != "none", initializer_range=0.2,
        softcap=10.0 if variant == "gemma4" else None, draft_vocab_size=None if d2t is None else len(d2t))
    mx.random.seed(seed)
    return DSparkDrafter(DSparkConfig(**fields | changes), d2t).bind(model)


def features_for(drafter, B, c, seed=1):
    c_ = drafter.config
    return mx.random.normal((B, c, len(c_.target_layer_ids) * c_.target_width), key=mx.random.key(seed))


def filled(drafter, features, chunks=None, **how):
    cache, at = drafter.make_cache(features.shape[0], **how), 0
    for n in chunks or [features.shape[1]]:
        drafter.extend(features[:, at:at + n], cache)
        at += n
    return cache


def same(a, b, tolerance=2e-5): assert mx.abs(a - b).max().item() < tolerance


@pytest.mark.parametrize("name", REAL_ROUNDS)
def test_real_rounds_of_the_reference(targets, name):
    drafter, rounds = load_drafter(GOLDENS / "drafters" / name, targets[name[:2]]), mx.load(str(GOLDENS / "forward" / f"{name}__rounds_prompt2.safetensors"))
    cache = drafter.make_cache()
    for r in range(6):
        t = {k.split(".", 1)[1]: v for k, v in rounds.items() if k.startswith(f"round{r}.")}
        drafter.extend(t["target_hidden_states"], cache)
        anchor = t["draft_input_ids"][:, 0]
        h = drafter.block(anchor, cache)
        same(h, t["block_hidden"], 4e-5)
        same(drafter.heads(h, mx.concatenate([anchor[:, None], t["draft_tokens"][:, :-1]], axis=1))[0], t["corrected_logits"], 4e-5)
        assert drafter.draft(anchor, cache, drafter.config.block_size).tokens.tolist() == t["draft_tokens"].tolist()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("compiled", [False, True])
def test_draft_is_the_reference_compiled_or_not(targets, name, compiled):
    drafter, rounds = load_drafter(GOLDENS / "drafters" / name, targets[name[:2]]), mx.load(str(GOLDENS / "forward" / f"{name}.safetensors"))
    drafter.compiled, cache = compiled, drafter.make_cache()
    for r in range(4):
        drafter.extend(rounds[f"round{r}.target_hidden_states"], cache)
        draft = drafter.draft(rounds[f"round{r}.anchor"], cache, drafter.config.block_size, want_confidence=True)
        assert draft.tokens.tolist() == rounds[f"round{r}.draft_tokens"].tolist()
        golden = rounds.get(f"round{r}.confidence_logits")
        assert (draft.confidence is None) == (golden is None)
        if golden is not None: same(draft.confidence, mx.sigmoid(golden))


@pytest.mark.parametrize("head,reduced,variant", [(h, r, v) for h, r, v in product(HEADS, (False, True), ("qwen3", "gemma4"))])
def test_same_tokens_however_it_runs(targets, head, reduced, variant):
    "Batch or alone, few tokens or many, chunked or whole context, compiled or not, greedy or sampled."
    d2t = mx.array([3, 500, 17, 44, 101, 9, 260, 333]) if reduced else None
    drafter = drafter_for(targets["q3"], head, variant=variant, d2t=d2t)
    features, anchors, lengths = features_for(drafter, 3, 12), mx.array([5, 17, 499]), [12, 3, 7]
    cache = drafter.make_cache(3)
    drafter.extend(features[:, :4], cache, [4, 3, 4])
    drafter.extend(features[:, 4:], cache, [8, 0, 3])
    assert cache.lengths == lengths
    for sampling in (Sampling(), Sampling(temp=0.8, top_p=0.9)):
        how = dict(sampling=sampling, u=None if sampling.greedy else mx.random.uniform(shape=(3, 5), key=mx.random.key(4)))
        out = drafter.draft(anchors, cache, 5, want_probs=True, want_confidence=True, **how)
        assert (out.p_draft is None) == sampling.greedy
        few = drafter.draft(anchors, cache, 2, **how | ({} if sampling.greedy else {"u": how["u"][:, :2]}))
        assert few.tokens.tolist() == out.tokens[:, :2].tolist() and few.confidence is None and few.p_draft is None
        drafter.compiled = True
        again = drafter.draft(anchors, cache, 5, want_probs=True, want_confidence=True, **how)
        drafter.compiled = None
        assert again.tokens.tolist() == out.tokens.tolist()
        same(again.confidence, out.confidence)
        if reduced: assert set(out.tokens.reshape(-1).tolist()) <= set(d2t.tolist())
        for b, n in enumerate(lengths):
            alone = filled(drafter, features[b:b + 1, :n], [1, n - 1])
            single = drafter.draft(anchors[b:b + 1], alone, 5, want_probs=True, want_confidence=True, **how | ({} if sampling.greedy else {"u": how["u"][b:b + 1]}))
            assert single.tokens.tolist() == out.tokens[b:b + 1].tolist()
            same(single.confidence, out.confidence[b:b + 1])
            if not sampling.greedy: same(single.p_draft, out.p_draft[b:b + 1])


@pytest.mark.parametrize("head", HEADS)
def test_reported_law_is_the_teacher_forced_one(targets, head):
    "q of position k is softmax of the corrected logits given the tokens that were drafted before it; no mass outside the draft vocabulary."
    d2t = mx.array([3, 500, 17, 44, 101, 9])
    drafter = drafter_for(targets["q3"], head, d2t=d2t)
    cache, anchor = filled(drafter, features_for(drafter, 2, 6)), mx.array([17, 44])
    draft = drafter.draft(anchor, cache, 5, sampling=Sampling(temp=0.5), key=mx.random.key(0), want_probs=True, want_confidence=True)
    h, prev = drafter.block(anchor, cache), mx.concatenate([anchor[:, None], draft.tokens[:, :-1]], axis=1)
    logits, conf = drafter.heads(h, prev)
    same(draft.p_draft[..., d2t], mx.softmax(logits / 0.5, axis=-1))
    same(draft.p_draft.sum(-1), mx.ones((2, 5)))
    same(draft.confidence, mx.sigmoid(conf))


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_stays_bfloat16_and_close(targets, name):
    drafter = load_drafter(GOLDENS / "drafters" / name, targets[name[:2]], dtype=mx.bfloat16, share=False)
    rounds, cache, agreed = mx.load(str(GOLDENS / "forward" / f"{name}.safetensors")), drafter.make_cache(), []
    for r in range(4):
        drafter.extend(rounds[f"round{r}.target_hidden_states"], cache)
        anchor, n = rounds[f"round{r}.anchor"], drafter.config.block_size
        draft = drafter.draft(anchor, cache, n, sampling=Sampling(temp=1.0), want_probs=True, want_confidence=True)
        assert draft.p_draft.dtype == mx.float32 and cache.kv.dtype == drafter.block(anchor, cache).dtype == mx.bfloat16
        agreed.append((drafter.draft(anchor, cache, n).tokens == rounds[f"round{r}.draft_tokens"]).mean().item())
    assert np.mean(agreed) > 0.8


def test_calibration_divides_confidence_logits_and_changes_nothing_else(targets):
    drafter = drafter_for(targets["q3"])
    drafter.compiled = True
    cache, anchor = filled(drafter, features_for(drafter, 1, 6)), mx.array([17])
    before = drafter.draft(anchor, cache, 4, want_confidence=True)
    drafter.config.calibration = {"temps": [1.0, 2.0, 0.5, 4.0, 1.0]}
    after = drafter.draft(anchor, cache, 4, want_confidence=True)
    logit = lambda p: mx.log(p) - mx.log1p(-p)
    assert before.tokens.tolist() == after.tokens.tolist()
    same(logit(after.confidence) * mx.array([1.0, 2.0, 0.5, 4.0]), logit(before.confidence), 1e-4)


@pytest.mark.parametrize("window", [4, 8, 20])
def test_a_window_is_the_full_cache_with_older_columns_hidden(targets, window):
    drafter = drafter_for(targets["q3"], "rnn")
    features, anchor = features_for(drafter, 2, 90), mx.array([5, 17])
    full, ring = filled(drafter, features, [30, 1, 50, 9]), filled(drafter, features, [30, 1, 50, 9], window=window)
    assert ring.capacity == window and full.capacity == 128 and ring.lengths == full.lengths == [90, 90]
    recent = mx.contiguous(full.kv[:, :, 90 - window:90])
    h = drafter._block(anchor, recent, mx.array(full.lengths), None)
    same(drafter.block(anchor, ring), h)
    assert mx.abs(drafter.block(anchor, full) - h).max().item() > 1e-3


def test_a_ragged_window(targets):
    "Each request keeps its own newest columns, however unevenly they arrive."
    drafter, given, at = drafter_for(targets["q3"]), ([], []), 0
    features, anchor, cache = features_for(drafter, 2, 40), mx.array([5, 17]), drafter.make_cache(2, window=8)
    for n in ([20, 3], [1, 6], [13, 14]):
        drafter.extend(features[:, at:at + max(n)], cache, n)
        for b in range(2):
            given[b].append(features[b:b + 1, at:at + n[b]])
            alone = filled(drafter, mx.concatenate(given[b], axis=1), window=8)
            assert alone.lengths == cache.lengths[b:b + 1]
            same(drafter.block(anchor[b:b + 1], alone), drafter.block(anchor, cache)[b:b + 1])
        at += max(n)


def test_growing_changes_nothing_and_blocks_leave_no_trace(targets):
    drafter = drafter_for(targets["q3"])
    features, anchor = features_for(drafter, 1, 70), mx.array([5])
    cache = filled(drafter, features[:, :60])
    kept = mx.array(cache.kv)
    drafter.draft(anchor, cache, 5)
    assert mx.array_equal(cache.kv, kept) and cache.lengths == [60]
    drafter.extend(features[:, 60:], cache)
    assert cache.capacity == 128
    same(drafter.block(anchor, cache), drafter.block(anchor, filled(drafter, features)))
    two = filled(drafter, mx.concatenate([features, features[:, ::-1]]))
    keep_rows(two, [1])
    same(drafter.block(anchor, two), drafter.block(anchor, filled(drafter, features[:, ::-1])))


@pytest.mark.parametrize("variant", ["qwen3", "gemma4"])
def test_training_pass_equals_decoding(targets, variant):
    "Blocks trained together see what a decoder sees at their anchor; unused slots give finite gradients."
    drafter = drafter_for(targets["q3"], "rnn", variant=variant)
    features, tokens = features_for(drafter, 2, 20), mx.random.randint(0, 512, (2, 20), key=mx.random.key(2))
    anchors, keep = mx.array([[0, 6, 19], [3, 11, 0]]), mx.array([[True, True, True], [True, True, False]])
    h = drafter.block_train(features, tokens, anchors, keep)
    for b, a in product(range(2), range(3)):
        if not keep[b, a].item(): continue
        start = anchors[b, a].item()
        cache = filled(drafter, features[b:b + 1, :start]) if start else drafter.make_cache()
        same(drafter.block(tokens[b:b + 1, start], cache), h[b:b + 1, a])

    def loss(params):
        drafter.update(params)
        logits, conf = drafter.heads(drafter.block_train(features, tokens, anchors, keep), mx.zeros((2, 3, 5), mx.int32))
        return logits.square().mean() + conf.square().mean()
    grads = dict(tree_flatten(mx.grad(loss)(drafter.trainable_parameters())))
    assert all(mx.isfinite(g).all().item() for g in grads.values())
    assert not any("embed_tokens" in n or "lm_head" in n or "layer_scalar" in n for n in grads)


@pytest.mark.parametrize("head,dtype,reduced", list(product(HEADS, (mx.float32, mx.bfloat16), (False, True))))
def test_saved_and_loaded_are_one(targets, tmp_path, head, dtype, reduced):
    drafter = drafter_for(targets["q3"], head, d2t=mx.array([3, 500, 17]) if reduced else None)
    drafter.set_dtype(dtype)
    save_drafter(drafter, tmp_path)
    save_drafter(drafter, tmp_path)                                     # over an older one
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    again = load_drafter(tmp_path, targets["q3"], dtype=dtype)
    ours, theirs = (dict(tree_flatten(d.parameters())) for d in (drafter, again))
    assert ours.keys() == theirs.keys() and all(mx.array_equal(ours[n], theirs[n]) for n in ours) and again.dtype == dtype
    assert again.config == drafter.config and (again.d2t is None) == (not reduced)


@pytest.mark.parametrize("head,tied", list(product(HEADS, (False, True))))
def test_quantized_drafters_travel(targets, tmp_path, head, tied):
    target = targets["g4" if tied else "q3"]
    drafter = drafter_for(target, head, d2t=mx.arange(0, 512, 2)).quantize(8, head_bits=8, markov_bits=8)
    cache, anchor = filled(drafter, features_for(drafter, 1, 6)), mx.array([17])
    save_drafter(drafter, tmp_path)
    packed, unpacked = (load_drafter(tmp_path, target, dequantize=on) for on in (False, True))
    for again in (packed, unpacked): same(again.block(anchor, cache), drafter.block(anchor, cache), 1e-4)
    assert packed.draft(anchor, cache, 5).tokens.tolist() == drafter.draft(anchor, cache, 5).tokens.tolist()
    assert footprint(packed)["round_bytes"] == footprint(drafter)["round_bytes"] < footprint(unpacked)["round_bytes"] / 2
    assert isinstance(parts(target).embed_tokens, nn.Embedding)         # the target was not touched


def test_compiled_step_sees_new_weights(targets):
    drafter = drafter_for(targets["q3"], "rnn")
    drafter.compiled, anchor = True, mx.array([17])
    cache = filled(drafter, features_for(drafter, 1, 6))
    drafter.draft(anchor, cache, 5)
    drafter.update({"norm": {"weight": -drafter.norm.weight}})
    compiled = drafter.draft(anchor, cache, 5).tokens.tolist()
    drafter.compiled = False
    assert drafter.draft(anchor, cache, 5).tokens.tolist() == compiled
    drafter.quantize(2, markov_bits=2)
    plain = drafter.draft(anchor, cache, 5).tokens.tolist()
    drafter.compiled = True
    assert drafter.draft(anchor, cache, 5).tokens.tolist() == plain


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gemma4", "qwen3_moe", "qwen3_next"])
def test_any_target_family_can_be_drafted_for(family, tmp_path):
    model, _ = tiny_target(family)
    drafter = drafter_for(model, "rnn", softcap=parts(model).softcap)
    source = drafter.as_source(model, window=16)
    source.start([[1, 2]] * 2, target=model, cache=[], sampling=Sampling(temp=1.0))
    source.observe([[1, 2], [1, 2]], [2, 1], features_for(drafter, 2, 2))
    draft = source.propose([5, 6], 5, key=mx.random.key(0), want_probs=True, want_confidence=True)
    assert draft.tokens.shape == (2, 5) and draft.p_draft.shape == (2, 5, parts(model).dims.vocab_size) and draft.confidence.shape == (2, 5)
    save_drafter(drafter, tmp_path)
    load_drafter(tmp_path, model)


def test_a_hub_name_is_fetched(monkeypatch, targets):
    import huggingface_hub
    asked = []
    def fetch(repo, allow_patterns):
        asked.append((repo, allow_patterns))
        return str(GOLDENS / "drafters" / NAMES[-1])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    load_drafter("deepseek-ai/dspark_qwen3_4b_block7", targets["q3"])
    assert asked == [("deepseek-ai/dspark_qwen3_4b_block7", ["*.json", "*.safetensors"])]
    with pytest.raises(FileNotFoundError, match="no drafter './a/b'"): load_drafter("./a/b", targets["q3"])


def test_sharded_weights_are_read(targets, tmp_path):
    name = "q3_b7_vanilla_cm"
    weights = mx.load(str(GOLDENS / "drafters" / name / "model.safetensors"))
    for i in range(2): mx.save_safetensors(str(tmp_path / f"model-{i + 1:05}-of-00002.safetensors"), dict(list(weights.items())[i::2]))
    (tmp_path / "config.json").write_text((GOLDENS / "drafters" / name / "config.json").read_text())
    whole, sharded = load_drafter(GOLDENS / "drafters" / name, targets["q3"]), load_drafter(tmp_path, targets["q3"])
    for (n, a), (m, b) in zip(tree_flatten(whole.parameters()), tree_flatten(sharded.parameters()), strict=True): assert n == m and mx.array_equal(a, b)


def test_a_damaged_file_is_refused(targets, tmp_path):
    save_drafter(drafter_for(targets["q3"]), tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-4] + b"\0\0\0\1")
    with pytest.raises(ValueError, match="sha256 differs"): load_drafter(tmp_path, targets["q3"])
    (tmp_path / "model.safetensors").write_bytes(whole)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in [({"format_version": 0}, "format 0"), ({"format_version": 99}, "format 99"), ({"vocab_size": 288}, "vocabulary of 288")]:
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=message): load_drafter(tmp_path, targets["q3"])


def test_reduced_vocabulary_of_a_drafter_with_its_own_head(targets):
    whole = load_drafter(GOLDENS / "drafters" / "q3_b7_rnn_cm_emb", targets["q3"], share=False)
    ids = mx.arange(1, 512, 3)
    small = reduce_vocabulary(whole, ids, targets["q3"])
    h = whole.block(mx.array([4]), filled(whole, features_for(whole, 1, 5)))
    prev = ids[mx.arange(7)[None]]
    same(small.heads(h, prev)[0], whole.heads(h, prev)[0][..., ids])
    assert small.lm_head.weight.shape == (len(ids), 64) and whole.lm_head.weight.shape == (512, 64)


def test_random_start():
    "Normal weights of the given size, zero biases, unit norms; the RNN's output rows copy the embedding."
    model, _ = tiny_target("llama")
    drafter = drafter_for(model, "rnn", initializer_range=0.02)
    for name, p in tree_flatten(drafter.parameters()):
        if name.endswith("bias"): assert not p.any().item(), name
        elif p.ndim == 1: assert (p == 1).all().item(), name
        elif "joint_proj" not in name: assert abs(np.array(p).std() - 0.02) < 0.004, name
    assert mx.array_equal(drafter.markov_head.joint_proj.weight[64:, 32:64], mx.eye(32))
