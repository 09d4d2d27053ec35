"""Test the differentiable forward pass against the inference ops, and target features against transformers."""

import dataclasses
import itertools

import datasets
import pytest
import torch
from draft_variants import DFLASH2_VARIANTS, VARIANTS, config_dict, random_drafter, sliding
from families import VOCAB, make_target
from torch.nn.attention.flex_attention import create_mask

from dflash.drafter import DFlash2Config
from dflash_tools.train import (
    TargetFeatures,
    TrainConfig,
    add_dflash2,
    adopt_head_,
    adopt_layers_,
    draft_config,
    new_drafter,
)
from dflash_tools.train.model import ATTENTIONS, TrainableDrafter, check_trainable, visible_keys

LENGTH = 30
ANCHORS = torch.tensor([[1, 7, 20], [3, 16, 29]])
RULES = {
    **VARIANTS,
    **DFLASH2_VARIANTS,
    "window-causal-both": config_dict(**sliding("sfs", 9)),
    "causal-everywhere": config_dict(is_causal=True),
}


def inputs(config, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return target states ``[2, LENGTH, taps * hidden]`` and raw embeddings of the blocks at ``ANCHORS``."""
    generator = torch.Generator().manual_seed(seed)
    width = len(config.target_layer_ids) * config.hidden_size
    context = torch.randn(2, LENGTH, width, generator=generator)
    return context, torch.randn(2, 3, config.block_size, config.hidden_size, generator=generator)


@pytest.mark.parametrize(("causal", "window"), [(False, 0), (True, 0), (True, 5), (False, 3)])
def test_visible_keys_equal_a_slow_loop(causal, window):
    block = 4
    visible = visible_keys(ANCHORS, LENGTH, block, causal, window)
    for row, number in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        anchor = int(ANCHORS[row, number])
        for slot in range(block):
            query = anchor + slot
            for key in range(LENGTH + block):
                own = key >= LENGTH
                place = anchor + key - LENGTH if own else key
                seen = own or place < anchor
                seen = seen and not (causal and place > query) and not (window and abs(place - query) >= window)
                assert bool(visible[row, number, slot, key]) == seen


@pytest.mark.parametrize("name", RULES)
@torch.no_grad()
def test_hidden_states_equal_the_inference_ops(name):
    drafter = random_drafter(RULES[name])
    context, embeds = inputs(drafter.config)
    got = TrainableDrafter(drafter)(context, embeds, ANCHORS)
    for row in range(2):
        for number, anchor in enumerate(ANCHORS[row].tolist()):
            count = torch.tensor([anchor])
            features = drafter.fuse(context[row : row + 1, :anchor].contiguous(), count)
            scaled = drafter.scale_embeddings(embeds[row : row + 1, number])
            wanted = drafter(features, count, scaled, count, drafter.new_cache(1, 64))
            torch.testing.assert_close(got[row, number], wanted[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Qwen3-4B", "window-causal-both", "is_causal-false-with-window", "gpt-oss-20b"])
@torch.no_grad()  # the backward pass of FlexAttention needs CUDA
def test_both_attentions_give_the_same_numbers(name):
    drafter = random_drafter(RULES[name])
    context, embeds = inputs(drafter.config)
    ours, flex = (TrainableDrafter(drafter, attention=way)(context, embeds, ANCHORS) for way in ("matmul", "flex"))
    torch.testing.assert_close(flex, ours, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("causal", "window", "length", "block"), [
    *((causal, window, 700, 16) for causal, window in ((False, 0), (True, 0), (True, 150), (False, 40))),
    *((False, 0, length, block) for length, block in ((256, 16), (333, 10), (20, 4))),
    (True, 40, 333, 10),
])  # fmt: skip
def test_flex_attention_visits_every_tile_that_is_seen(length, block, causal, window):
    """On CUDA, FlexAttention skips all other tiles; elsewhere it reads only the mask."""
    generator = torch.Generator().manual_seed(0)
    anchors = torch.randint(0, length, (2, 20), generator=generator).sort(-1).values
    anchors[1, 7:] = 0  # as padding does
    mask = ATTENTIONS["flex"][0](anchors, length, block, causal, window, 1)
    rows, keys = 20 * block, length + 20 * block
    assert mask.seq_lengths == (rows, keys)
    seen = create_mask(mask.mask_mod, 2, None, rows, keys, device="cpu")[:, 0]
    slots = visible_keys(anchors, length, block, causal, window).flatten(1, 2)
    assert torch.equal(seen[..., :length], slots[..., :length])
    assert torch.equal(seen.sum(-1), slots.sum(-1))
    tiles = torch.nn.functional.pad(seen, (0, -keys % 128, 0, -rows % 128))
    tiles = tiles.unflatten(1, (-1, 128)).unflatten(3, (-1, 128))
    any_seen = tiles.any(4).any(2)
    visited = mask.to_dense()[:, 0].bool()
    assert not (any_seen & ~visited).any()
    assert visited.sum() < visited.numel() or length < 100, "some tiles are skipped"
    if not causal and not window:
        assert torch.equal(any_seen, visited)
    for b, t in itertools.product(range(2), range(visited.shape[1])):
        whole = mask.full_kv_indices[b, 0, t, : mask.full_kv_num_blocks[b, 0, t]].tolist()
        part = mask.kv_indices[b, 0, t, : mask.kv_num_blocks[b, 0, t]].tolist()
        assert not set(whole) & set(part)
        inside = tiles[b, t, : min(128, rows - 128 * t)]
        assert all(inside[:, tile].all() for tile in whole)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["Qwen3-4B", "window-causal-both"])
def test_flex_attention_on_cuda_gives_the_same_numbers_and_gradients(name):
    config = {**RULES[name], "head_dim": 64, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    drafter = random_drafter(config).cuda()
    generator = torch.Generator().manual_seed(0)
    shape = (2, 300, len(drafter.config.target_layer_ids) * drafter.config.hidden_size)
    context = torch.randn(shape, generator=generator).cuda()
    anchors = torch.randint(0, 300, (2, 24), generator=generator).sort(-1).values.cuda()
    embeds = torch.randn(2, 24, drafter.config.block_size, drafter.config.hidden_size, generator=generator).cuda()
    direction = torch.randn(embeds.shape, generator=generator).cuda()
    outputs, gradients = {}, {}
    for attention in ("matmul", "flex"):
        outputs[attention] = TrainableDrafter(drafter, attention=attention)(context, embeds, anchors)
        (outputs[attention] * direction).sum().backward()
        gradients[attention] = [p.grad for p in drafter.parameters()]
        drafter.zero_grad(set_to_none=True)
    torch.testing.assert_close(outputs["flex"], outputs["matmul"], rtol=1e-2, atol=1e-2)
    for ours, theirs in zip(gradients["flex"], gradients["matmul"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * float(theirs.abs().max()))


@pytest.mark.parametrize("attention", ["matmul", "flex"])
@torch.no_grad()
def test_a_block_sees_only_the_context_before_its_anchor_and_itself(attention):
    drafter = random_drafter()
    model = TrainableDrafter(drafter, attention=attention)
    context, embeds = inputs(drafter.config)
    before = model(context, embeds, ANCHORS)
    later = context.clone()
    later[0, 7:] += 1
    after = model(later, embeds, ANCHORS)
    torch.testing.assert_close(after[0, :2], before[0, :2])  # anchors 1 and 7
    assert (after[0, 2] - before[0, 2]).abs().max() > 1e-2  # anchor 20
    earlier = context.clone()
    earlier[0, 6] += 1
    assert (model(earlier, embeds, ANCHORS)[0, 1] - before[0, 1]).abs().max() > 1e-2
    others = embeds.clone()
    others[0, 1] += 1
    after = model(context, others, ANCHORS)
    torch.testing.assert_close(after[0, ::2], before[0, ::2])
    torch.testing.assert_close(after[1], before[1])


def test_an_unknown_attention_is_refused():
    with pytest.raises(ValueError, match="attention must be one of flex, matmul or None, got 'eager'"):
        TrainableDrafter(random_drafter(), attention="eager")


@pytest.mark.parametrize("given", [{"markov_rank": 4}, {"draft_vocab_size": 40}])
def test_a_dflash2_drafter_takes_no_markov_head_and_no_draft_vocabulary(given):
    drafter = new_drafter(draft_config(make_target("qwen3"), mask_token_id=1, num_layers=1, **given))
    with pytest.raises(ValueError, match="has no Markov head and the whole vocabulary"):
        add_dflash2(drafter, DFlash2Config(2, 16, 4, 4))


def test_options_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="Markov rank must be at least 0, got -1"):
        draft_config(make_target("qwen3"), mask_token_id=1, markov_rank=-1)
    with pytest.raises(ValueError, match="gamma must be left out with slot_weights dpace"):
        TrainConfig(slot_weights="dpace", gamma=3.0)


# ---------------------------------------------------------------------------------------------- the target


# What the scales are, of families whose default is 1.
CHANGES = {
    "granitemoehybrid": {"embedding_multiplier": 3.0, "logits_scaling": 4.0},
    "falcon_h1": {"embedding_multiplier": 3.0, "lm_head_multiplier": 0.5},
}


@pytest.mark.parametrize("name", [
    *("qwen3", "qwen3 (windowed)", "llama (llama3 RoPE)", "gemma3", "gemma4", "gpt_oss", "glm4_moe", "deepseek_v3"),
    *("glm_moe_dsa", "deepseek_v32", "deepseek_v4"),
    *("qwen3_5 (multimodal)", "kimi_linear", "nemotron_h", "granitemoehybrid", "falcon_h1", "lfm2"),
])  # fmt: skip
@torch.no_grad()
def test_features_embeddings_and_logits_equal_the_target(name):
    """This includes the scales of embeddings and logits that some families have."""
    target = make_target(name, **CHANGES.get(name, {}))
    ids = torch.randint(2, VOCAB, (2, 26), generator=torch.Generator().manual_seed(0))
    out = target(input_ids=ids, output_hidden_states=True, use_cache=False)
    states = [state if state.dim() == 3 else state.mean(2) for state in out.hidden_states]  # of hyper-connections
    taps = TargetFeatures(target, (0, 2))(ids)
    torch.testing.assert_close(taps, torch.cat([states[1], states[3]], -1), rtol=1e-4, atol=1e-4)
    drafter = new_drafter(draft_config(target, mask_token_id=1, num_layers=1, target_layer_ids=(1,)))
    whole = TargetFeatures(target, (3, 1))
    torch.testing.assert_close(whole(ids), torch.cat([states[4], states[2]], -1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(drafter.logits(states[-1], whole.head), out.logits, rtol=1e-4, atol=1e-4)
    embeds = torch.nn.functional.embedding(ids, whole.embedding_weight)
    torch.testing.assert_close(drafter.scale_embeddings(embeds), states[0], rtol=1e-5, atol=1e-5)


def test_a_draft_vocabulary_holds_the_most_frequent_tokens_and_the_targets_rows():
    target = make_target("qwen3")
    ids = [7] * 5 + [9] * 4 + [3] * 9 + [20, 8, 8]
    rows = datasets.Dataset.from_list([{"input_ids": ids, "loss_mask": [0 if token == 3 else 1 for token in ids]}])
    drafter = new_drafter(draft_config(target, mask_token_id=1, num_layers=1, draft_vocab_size=4))
    adopt_head_(drafter, target, rows)
    hidden = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    logits = drafter.logits(hidden, target.lm_head)
    kept = [7, 8, 9, 20]
    torch.testing.assert_close(logits[:, kept], target.lm_head(hidden)[:, kept])
    assert logits.isfinite().sum(-1).tolist() == [4, 4]
    with pytest.raises(ValueError, match="draft vocabulary must be below the target's 97"):
        draft_config(target, mask_token_id=1, draft_vocab_size=97)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_new_drafter_starts_as_the_targets_last_layers(name):
    target = make_target(name)
    drafter = new_drafter(draft_config(target, mask_token_id=1, num_layers=2, target_layer_ids=(0, 2)))
    assert adopt_layers_(drafter, target)
    for mine, theirs in zip(drafter.layers, target.model.layers[-2:], strict=True):
        mine = mine.state_dict()
        for key, weight in theirs.state_dict().items():
            torch.testing.assert_close(mine[key], weight, rtol=0, atol=0)
        if name == "llama":  # a normalized query is as large as the target's is on average
            hidden = torch.randn(4096, 1, target.config.hidden_size, generator=torch.Generator().manual_seed(0))
            normal = hidden * hidden.square().mean(-1, keepdim=True).rsqrt()
            size = theirs.self_attn.q_proj(normal * theirs.input_layernorm.weight).square().mean().sqrt()
            torch.testing.assert_close(mine["self_attn.q_norm.weight"].mean(), size, rtol=0.02, atol=0)
    states = torch.randn(2, 2 * target.config.hidden_size, generator=torch.Generator().manual_seed(0))
    last, fused = states[:, target.config.hidden_size :], drafter.fc(states)
    assert torch.nn.functional.cosine_similarity(fused, last).min() > 0.9


@pytest.mark.parametrize(("name", "changes"), [("gemma2", {}), ("qwen2", {}), ("llama", {"intermediate_size": 16})])
def test_a_drafter_of_other_layers_stays_as_it_is(name, changes):
    target = make_target(name)
    drafter = new_drafter(draft_config(target, mask_token_id=1, num_layers=2, target_layer_ids=(2,), **changes))
    before = {key: weight.clone() for key, weight in drafter.state_dict().items()}
    assert not adopt_layers_(drafter, target)
    for key, weight in drafter.state_dict().items():
        torch.testing.assert_close(weight, before[key], rtol=0, atol=0)


def test_the_target_is_not_changed():
    target = make_target("qwen3")
    TargetFeatures(target, (0,))
    assert len(target.model.layers) == 4
    assert not any(module._forward_hooks for module in target.modules())


def test_a_dflash2_drafter_from_the_anchors_row_is_refused_before_it_is_trained():
    config = draft_config(make_target("qwen3"), mask_token_id=1, predicts_from_anchor=True)
    config = dataclasses.replace(config, dflash2=DFlash2Config())
    with pytest.raises(ValueError, match="a DFlash 2 drafter from the anchor's row cannot be trained"):
        check_trainable(config)
