"""A target's pass over a tree: every row has the bits that it has in the chain of its ancestors."""

import pytest
import torch
from families import FAMILIES, make_target
from op_checks import OpByOp
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from trees import longest_paths, random_shapes

from dflash import decoder, ops
from dflash.state import Tree
from dflash.targets import Target

TAPS = (0, 2, 3)
LENGTHS = [57, 40]  # the first tree crosses the end of a tile of attention
PROMPT = (torch.arange(2 * max(LENGTHS)) * 7 % 90 + 1).view(2, -1)
MORE = {
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 20, "attn_logit_softcapping": 3.0},
    "gpt_bigcode": {"n_positions": 90, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_inner": 96},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
}


def model_of(family: str, dtype: torch.dtype, **changes) -> nn.Module:
    if family in FAMILIES:
        return make_target(family, dtype=dtype, **changes)
    torch.manual_seed(0)
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 90, "vocab_size": 97}
    small |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = CONFIG_MAPPING[family](**({"vocab_size": 97} if family == "gpt_bigcode" else small), **MORE[family])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype).eval()


@torch.no_grad()
def run(target: Target, ids: torch.Tensor, tree: Tree | None) -> torch.Tensor:
    """Logits and taps ``[batch, rows, vocab + taps * hidden]`` of rows after the prompts, from a fresh cache."""
    batch, rows = ids.shape
    cache, lengths = target.new_cache(batch, max(LENGTHS) + rows, rows), torch.tensor(LENGTHS[:batch])
    target.forward(PROMPT[:batch], torch.zeros_like(lengths), cache, 1, lengths)
    logits, taps = target.forward(ids, lengths, cache, tree=tree)
    return torch.cat([logits, *taps], -1)


def chains(target: Target, ids: torch.Tensor, tree: Tree):
    """Yield ``(sequence, path, outputs)``: each path of the tree as a chain in a pass of the same shapes."""
    paths = [longest_paths(tree, b) for b in range(len(ids))]
    for n in range(max(map(len, paths))):
        chosen = [of_sequence[min(n, len(of_sequence) - 1)] for of_sequence in paths]
        block = torch.zeros_like(ids)
        for b, path in enumerate(chosen):
            block[b, : len(path)] = ids[b, path]
        out = run(target, block, None)
        for b, path in enumerate(chosen):
            yield b, path, out[b, : len(path)]


def tree_and_ids(rows: int, seed: int = 0) -> tuple[Tree, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return random_shapes(rows, 2, seed), torch.randint(1, 90, (2, rows), generator=generator)


def assert_rows_are_their_chains(target: Target, rows: int, exact: bool = True) -> None:
    tree, ids = tree_and_ids(rows)
    out = run(target, ids, tree)
    assert out.isfinite().all()
    for b, path, want in chains(target, ids, tree):
        if exact:
            assert torch.equal(out[b, path], want), (b, path)
        else:
            torch.testing.assert_close(out[b, path], want, rtol=0, atol=2e-4)


@pytest.fixture
def fixed_sums(monkeypatch):
    """Products of a block whose bits do not depend on its other rows, which torch's do not promise."""
    product = nn.functional.linear

    def linear(x, weight, bias=None):
        fits = ops.skinny(x.shape[:-1].numel(), x.dtype)
        return ops.linear(x, weight, bias) if fits else product(x, weight, bias)

    monkeypatch.setattr(nn.functional, "linear", linear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral (windowed)", "qwen2"])
class TestFused:
    def test_rows_have_the_bits_of_their_chains(self, family, dtype):
        target = Target(make_target(family, dtype=dtype), TAPS)
        assert not target.fused_reason
        assert_rows_are_their_chains(target, 24)

    def test_rows_have_the_bits_of_their_chains_op_by_op(self, family, dtype, monkeypatch):
        target = Target(make_target(family, dtype=dtype), TAPS)
        monkeypatch.setattr(decoder, "ops", OpByOp(ops))
        assert_rows_are_their_chains(target, 17)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3 (windowed)", "gemma3", "gemma2", "gpt_bigcode", "opt"])
def test_rows_of_modules_have_the_bits_of_their_chains(family, dtype, fixed_sums):
    target = Target(model_of(family, dtype), TAPS[:2], fused=False)
    assert_rows_are_their_chains(target, 24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "minimax_m2"])
def test_rows_among_experts_have_the_bits_of_their_chains(family, dtype, request):
    target = Target(make_target(family, dtype=dtype), TAPS)
    request.getfixturevalue("fixed_sums")  # afterwards: with a function replaced, the experts would be torch's
    assert_rows_are_their_chains(target, 24)


def test_rows_among_experts_in_torch_have_the_logits_of_their_chains():
    """Which rows share an expert decides over the shapes of torch's products, so bits may differ."""
    assert_rows_are_their_chains(Target(make_target("gpt_oss"), TAPS, fused=False), 17, exact=False)


def test_a_wide_tree_has_the_bits_of_its_chains():
    assert_rows_are_their_chains(Target(make_target("qwen3"), TAPS), 70)
    assert_rows_are_their_chains(Target(make_target("qwen3"), TAPS), 128)
