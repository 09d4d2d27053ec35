"""Save drafters with the speculators library, and read them here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for the models that other tests make

import pytest
import torch
from families import VOCAB, make_target
from transformers import Qwen3Config

import dflash
from dflash import DraftConfig
from dflash.train.export import export

speculators = pytest.importorskip("speculators")

from speculators.models.dflash.config import DFlashSpeculatorConfig  # noqa: E402
from speculators.models.dflash.core import DFlashDraftModel  # noqa: E402
from speculators.proposals.greedy import GreedyTokenProposalConfig  # noqa: E402

KNOWN = torch.tensor([2, 3, 5, 8, 13, 21, 34, 55, 89])
BLOCK, LENGTH, ANCHOR = 6, 24, 11
PARTS = ("embed_tokens.weight", "lm_head.weight")


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3")


def make(target, *, reduced: bool = False, **changes) -> DFlashDraftModel:
    """Return a random drafter of the library, with the target's embedding, and its head or a reduced one."""
    kinds = changes.pop("layer_types", ["full_attention"] * 2)
    layer = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=88, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, layer_types=kinds, max_window_layers=0,
        use_sliding_window="sliding_attention" in kinds, sliding_window=32,
    )  # fmt: skip
    layer._attn_implementation = "eager"
    method = GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)
    verifier = speculators.VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"])
    described = speculators.SpeculatorsConfig(
        algorithm="dflash", proposal_methods=[method], default_proposal_method="greedy", verifier=verifier
    )
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=len(KNOWN) if reduced else VOCAB, block_size=BLOCK,
        aux_hidden_state_layer_ids=[2, 4], mask_token_id=1, speculators_config=described, **changes,
    )  # fmt: skip
    model, generator = DFlashDraftModel(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(values / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else 1 + values / 4)
        model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        if not reduced:
            model.lm_head.weight.copy_(target.lm_head.weight)
    if reduced:
        known = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, KNOWN, True)
        model.load_vocab_mappings(known, KNOWN - torch.arange(len(KNOWN)))
    return model


def save_all(model: DFlashDraftModel, folder: Path) -> Path:
    """Save as the library did up to 0.7, with the embedding and the head of every drafter."""
    skipped = model._keys_to_ignore_on_save
    model.__dict__["_keys_to_ignore_on_save"] = [name for name in skipped if name not in PARTS]
    model.save_pretrained(folder)
    return folder


def compare_logits(model: DFlashDraftModel, draft: dflash.Drafter, target) -> None:
    """Check that a block after ``ANCHOR`` tokens has the library's logits."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(1, LENGTH, 128, generator=generator)
    ids = torch.randint(VOCAB, (1, LENGTH), generator=generator)
    mask = torch.zeros(1, LENGTH).index_fill(1, torch.tensor(ANCHOR), 1)
    with torch.no_grad():
        _, expected, *_ = model.eval()._backbone_forward(
            states, ids, mask, torch.zeros(1, LENGTH, 64), torch.zeros(1, LENGTH, dtype=torch.int64), max_anchors=1
        )
    cache, length = draft.new_cache(1, 32), torch.tensor([ANCHOR])
    features, none = draft.fuse(states[:, :ANCHOR], length), torch.tensor([0])
    draft.inject_(features, torch.arange(ANCHOR)[None], cache)
    block = torch.cat([ids[:, ANCHOR : ANCHOR + 1], torch.ones(1, BLOCK - 1, dtype=torch.int64)], 1)
    embeds = draft.embed(block, target.model.embed_tokens.weight)
    logits = draft.logits(draft(features[:, :0], none, embeds, length, cache), target.lm_head)
    if draft.config.draft_vocab_size is not None:
        assert logits.isfinite().sum() == logits[..., KNOWN].numel()
        logits = logits[..., KNOWN]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("non_causal", [False, True, None])
@pytest.mark.parametrize("kinds", ["ff", "ss", "sf"])
def test_a_saved_drafter_gives_the_same_logits(target, tmp_path, kinds, non_causal):
    types = [{"f": "full_attention", "s": "sliding_attention"}[kind] for kind in kinds]
    changes = {} if non_causal is None else {"sliding_window_non_causal": non_causal}
    model = make(target, layer_types=types, **changes)
    model.save_pretrained(tmp_path)
    draft = dflash.load_draft(tmp_path)
    assert (draft.config.own_parts, draft.config.target_layer_ids) == ((), (1, 3))
    compare_logits(model, draft, target)


def test_a_saved_drafter_with_embedding_and_head_shares_the_targets(target, tmp_path):
    model = make(target)
    draft = dflash.load_draft(save_all(model, tmp_path))
    assert draft.config.own_parts == ("embed_tokens", "lm_head")
    compare_logits(model, draft, target)
    dflash.Generator(target, draft, max_length=32)
    assert draft.lm_head.weight.data_ptr() == target.lm_head.weight.data_ptr()
    assert draft.embed_tokens.weight.data_ptr() == target.model.embed_tokens.weight.data_ptr()
    compare_logits(model, draft, target)


@pytest.mark.parametrize("save", [save_all, DFlashDraftModel.save_pretrained])
def test_a_saved_drafter_with_a_reduced_vocabulary_gives_the_same_logits(target, tmp_path, save):
    model = make(target, reduced=True)
    save(model, tmp_path)
    draft = dflash.load_draft(tmp_path)
    assert draft.config.draft_vocab_size == len(KNOWN)
    compare_logits(model, draft, target)
    ids = torch.arange(9)[None] + 3
    answers = [dflash.generate(target, each, ids, max_new_tokens=20) for each in (draft, None)]
    assert torch.equal(*answers)


def test_a_drafter_in_memory_is_read_without_a_file(target):
    model = make(target, reduced=True)
    compare_logits(model, dflash.load_draft(model), target)


def test_an_export_is_read_back_by_the_library(target, tmp_path):
    model = make(target, reduced=True)
    model.save_pretrained(tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "out", "speculators", target="owner/target")
    config = DFlashSpeculatorConfig.from_pretrained(tmp_path / "out")
    assert config.draft_vocab_size == len(KNOWN)
    assert DraftConfig.from_config(config) == DraftConfig.from_config(model.config)
