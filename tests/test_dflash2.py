"""Test DFlash 2 drafters: their config, their tensors, and their hidden states against an oracle in float64."""

import re

import pytest
import torch
from draft_variants import (
    DFLASH2_VARIANTS,
    config_dict,
    dflash2_dict,
    identity_dflash2,
    random_drafter,
    random_tensors,
    save_checkpoint,
)
from op_checks import assert_as_exact_as_torch
from test_drafter import inputs, poisoned, two_passes
from torch.nn.functional import linear, silu

from dflash import DraftConfig, Drafter, load_draft
from dflash.drafter import DFlash2Config

KEYS = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 5}


# ---------------------------------------------------------------------------------------------- the config


@pytest.mark.parametrize("architecture", ["DFlash2DraftModel", "Qwen3DFlash2DraftModel"])
def test_a_dflash_2_config_is_recognized_at_either_level(architecture):
    expected = DFlash2Config(2, 16, 8, 5)
    assert DraftConfig.from_config(dflash2_dict(architectures=[architecture])).dflash2 == expected
    section = {"mask_token_id": 100, "target_layer_ids": [1, 9]}
    top = config_dict(architectures=[architecture], dflash_config=section, **KEYS)
    assert DraftConfig.from_config(top).dflash2 == expected
    assert DraftConfig.from_config(config_dict(architectures=None, dflash_config=section | KEYS)).dflash2 == expected
    assert DraftConfig.from_config(config_dict()).dflash2 is None


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        *(({key: None}, {}, f"DFlash 2 drafter states .*, and {key} is missing") for key in KEYS),
        ({"conv_kernel_size": 0}, {}, "conv_kernel_size must be an integer >= 1, got 0"),
        ({"conv_kernel_size": 2.0}, {}, "conv_kernel_size must be an integer >= 0, got 2.0"),
        ({"conv_group_size": 48}, {}, "conv_group_size must divide hidden_size 64, got 48"),
        ({"selector_top_k": 102}, {}, "selector_top_k must be at most vocab_size 101, got 102"),
        ({"selector_top_k": 129}, {"vocab_size": 1000}, "selector_top_k must be at most 128, got 129"),
        ({}, {"vocab_size": None}, "vocab_size is missing: a DFlash 2 drafter's codebooks have that many rows"),
    ],
)
def test_what_a_dflash_2_config_gets_wrong_is_named(section, changes, message):
    config = dflash2_dict(**changes)
    config["dflash_config"] = {k: v for k, v in (config["dflash_config"] | section).items() if v is not None}
    with pytest.raises(ValueError, match=message):
        DraftConfig.from_config(config)


# ---------------------------------------------------------------------------------------------- the tensors


@pytest.fixture
def tensors():
    return random_tensors(DraftConfig.from_config(dflash2_dict()))


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_codebooks_load_under_both_names(suffix, tensors, tmp_path):
    renamed = {name + suffix if name.endswith("codebook") else name: tensor for name, tensor in tensors.items()}
    state = load_draft(save_checkpoint(tmp_path, dflash2_dict(), renamed)).state_dict()
    assert state.keys() == tensors.keys()
    assert all(torch.equal(state[name], tensors[name]) for name in tensors)


def test_a_codebook_under_both_names_is_refused(tensors, tmp_path):
    name = "candidate_selector.predecessor_codebook"
    save_checkpoint(tmp_path, dflash2_dict(), tensors | {f"{name}.weight": tensors[name].clone()})
    with pytest.raises(ValueError, match=f"tensors {name} and {name}.weight both hold {name}"):
        load_draft(tmp_path)


PARTS = [
    "layers.1.attention_conv.base_kernel",
    "layers.1.mlp_conv.kernel_projection.weight",
    "candidate_selector.predecessor_codebook",
]


@pytest.mark.parametrize("name", PARTS)
def test_missing_and_misshapen_parts_of_dflash_2_are_named(name, tensors, tmp_path):
    shape = list(tensors[name].shape)
    short = tensors | {name: tensors[name][:1].clone()}
    made, got = re.escape(str(shape)), re.escape(str([1, *shape[1:]]))
    sizes = "draft_vocab_size None, conv_kernel_size 2, conv_group_size 16, selector_rank 8, selector_top_k 5"
    with pytest.raises(ValueError, match=rf"the config makes tensor {name} {made}, got {got} \(.*, {sizes}\)"):
        load_draft(save_checkpoint(tmp_path / "short", dflash2_dict(), short))
    del tensors[name]
    with pytest.raises(ValueError, match=f"missing tensors: {name} "):
        load_draft(save_checkpoint(tmp_path / "missing", dflash2_dict(), tensors))


# ---------------------------------------------------------------------------------------------- the forward pass


def normed(x, weight):
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def convolved(x, dynamic, base):
    """Convolve one sequence's rows ``x [rows, hidden]`` row by row; ``dynamic [rows, taps, groups]``."""
    taps, groups = dynamic.shape[1:]
    group = torch.arange(x.shape[1]) // (x.shape[1] // groups)
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for tap in range(min(taps, row + 1)):
            out[row] += (base[tap] + dynamic[row, tap, group]) * x[row - tap]
    return out


def oracle_pass(config: DraftConfig, tensors, context, block, dtype=torch.float64):
    """Return the hidden states of one sequence's block after all of its context, from nothing."""
    w = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    features = normed(linear(context.to(dtype), w["fc.weight"]), w["hidden_norm.weight"])
    length, rows, dim = len(context), len(block), config.head_dim
    inverse = 1 / config.rope.theta ** (torch.arange(0, dim, 2).to(dtype) / dim)
    angles = torch.arange(length + rows).to(dtype)[:, None] * inverse
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def heads(x, name, norm, first):
        x = normed(linear(x, w[f"{name}.weight"]).unflatten(-1, (-1, dim)), w[f"{norm}.weight"])
        one, two = x.chunk(2, -1)
        at = slice(first, first + len(x))
        return torch.cat([one * cos[at] - two * sin[at], two * cos[at] + one * sin[at]], -1)

    def around(x, name, inner):
        """Run ``inner`` between the two sides of a convolution."""
        base, taps = w[f"{name}.base_kernel"], config.dflash2.conv_kernel_size
        dynamic = linear(x, w[f"{name}.kernel_projection.weight"]).view(rows, 2, taps, -1)
        return convolved(inner(convolved(x, dynamic[:, 0], base[0])), dynamic[:, 1], base[1])

    h = block.to(dtype) * config.input_embedding_scale
    for i, (causal, window) in enumerate(zip(config.causal, config.window, strict=True)):
        layer, attention = f"layers.{i}", f"layers.{i}.self_attn"
        ahead = torch.arange(length + rows) - torch.arange(length, length + rows)[:, None]  # of key to query
        visible = ~(ahead > 0) if causal else torch.ones_like(ahead, dtype=torch.bool)
        visible = visible & (ahead.abs() < window) if window else visible

        def attend(x, attention=attention, visible=visible):
            rows_in = torch.cat([features, x])
            q = heads(x, f"{attention}.q_proj", f"{attention}.q_norm", length)
            k = heads(rows_in, f"{attention}.k_proj", f"{attention}.k_norm", 0)
            v = linear(rows_in, w[f"{attention}.v_proj.weight"]).unflatten(-1, (-1, dim))
            k, v = (t.repeat_interleave(config.num_attention_heads // config.num_kv_heads, 1) for t in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
            shares = torch.where(visible, scores, -torch.inf).softmax(-1)
            return linear(torch.einsum("hqk,khd->qhd", shares, v).flatten(1), w[f"{attention}.o_proj.weight"])

        def mlp(x, name=f"{layer}.mlp"):
            gate, up = (linear(x, w[f"{name}.{part}_proj.weight"]) for part in ("gate", "up"))
            return linear(silu(gate) * up, w[f"{name}.down_proj.weight"])

        h = h + around(normed(h, w[f"{layer}.input_layernorm.weight"]), f"{layer}.attention_conv", attend)
        h = h + around(normed(h, w[f"{layer}.post_attention_layernorm.weight"]), f"{layer}.mlp_conv", mlp)
    return normed(h, w["norm.weight"])


@pytest.mark.parametrize("rows", [16, 3])
@pytest.mark.parametrize("name", DFLASH2_VARIANTS)
def test_hidden_states_equal_the_oracle(name, rows):
    """Three ragged rows of a batch, blocks as long as trained and shorter, and context from an earlier step."""
    config = DraftConfig.from_config(DFLASH2_VARIANTS[name])
    rows, tensors, draft = min(rows, config.block_size), random_tensors(config), random_drafter(DFLASH2_VARIANTS[name])
    (context, block), lengths = inputs(config, 3, rows=12), torch.tensor([9, 1, 5])
    cache, counts = poisoned(draft, 3, 32), torch.tensor([3, 1, 0])
    index, before = torch.arange(12).expand(3, -1), lengths - counts
    draft.inject_(draft.fuse(context, before), torch.where(index < before[:, None], index, -1), cache)
    fresh = context.gather(1, (before[:, None] + torch.arange(4))[..., None].expand(-1, -1, context.shape[2]))
    out = draft(draft.fuse(fresh, counts), counts, draft.scale_embeddings(block[:, :rows]), lengths, cache)
    for row in range(3):
        given = config, tensors, context[row, : lengths[row]], block[row, :rows]
        assert_as_exact_as_torch(out[row], oracle_pass(*given, dtype=torch.float32), oracle_pass(*given), factor=3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DFLASH2_VARIANTS)
def test_identity_convolutions_give_the_bits_of_a_first_generation_drafter(name, dtype):
    config = DFLASH2_VARIANTS[name]
    tensors = identity_dflash2(random_tensors(DraftConfig.from_config(config)))
    section = {key: value for key, value in config["dflash_config"].items() if key not in KEYS}
    first = Drafter(DraftConfig.from_config(config | {"architectures": None, "dflash_config": section}))
    first.load_state_dict({k: v for k, v in tensors.items() if "_conv" not in k and "selector" not in k})
    second = Drafter(DraftConfig.from_config(config))
    second.load_state_dict(tensors)
    context, block = inputs(first.config, 2, dtype=dtype)
    passes = [two_passes(draft.to(dtype), context, block, [17, 3], [3, 1])[:2] for draft in (first, second)]
    assert all(torch.equal(a, b) for a, b in zip(*passes, strict=True))
