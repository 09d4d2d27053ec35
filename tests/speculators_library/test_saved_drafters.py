"""Save drafters with the speculators library and with SpecForge, and read them here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for the models that other tests make

import pytest
import safetensors.torch
import torch
from draft_variants import KNOWN, OFFSETS
from families import VOCAB
from transformers import Qwen3Config

import dflash
from dflash import DraftConfig
from dflash.proposers import LinkedPredictions
from dflash.sampling import Sampling
from dflash_tools.train.export import export

speculators = pytest.importorskip("speculators")
specforge = pytest.importorskip("specforge.modeling.draft.dspark")

from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig  # noqa: E402
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig  # noqa: E402
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig  # noqa: E402
from speculators.proposals.greedy import GreedyTokenProposalConfig  # noqa: E402

BLOCK, LENGTH, ANCHOR = 6, 24, 11
PARTS = ("embed_tokens.weight", "lm_head.weight")
TYPES = {
    "dflash": (DFlashSpeculatorConfig, DFlashDraftModel, {}),
    "dflash2": (DFlash2SpeculatorConfig, DFlash2DraftModel, {"selector_rank": 8, "selector_top_k": 5}),
    "dspark": (DSparkSpeculatorConfig, DSparkDraftModel, {"markov_rank": 8}),
}


def make(target, kind: str = "dflash", *, reduced: bool = False, **changes) -> DFlashDraftModel:
    """Return a random drafter of the library, with the target's embedding, and its head or a reduced one."""
    config_class, model_class, settings = TYPES[kind]
    changes = settings | changes
    kinds, window = changes.pop("layer_types", ["full_attention"] * 2), changes.pop("window", 32)
    layer = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=88, num_hidden_layers=len(kinds), num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, layer_types=kinds, max_window_layers=0,
        use_sliding_window="sliding_attention" in kinds, sliding_window=window,
    )  # fmt: skip
    layer._attn_implementation = "eager"
    method = GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)
    verifier = speculators.VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"])
    described = speculators.SpeculatorsConfig(
        algorithm=kind, proposal_methods=[method], default_proposal_method="greedy", verifier=verifier
    )
    config = config_class(
        transformer_layer_config=layer, draft_vocab_size=len(KNOWN) if reduced else VOCAB, block_size=BLOCK,
        aux_hidden_state_layer_ids=[2, 4], mask_token_id=1, speculators_config=described, **changes,
    )  # fmt: skip
    model, generator = model_class(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if "codebook" in name or "markov_w" in name:
                parameter.copy_(values)  # pair scores as large as the logits
            else:
                parameter.copy_(values / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else 1 + values / 4)
        model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        if not reduced:
            model.lm_head.weight.copy_(target.lm_head.weight)
    if reduced:
        known = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, KNOWN, True)
        model.load_vocab_mappings(known, OFFSETS)
    return model


def save_all(model: DFlashDraftModel, folder: Path) -> Path:
    """Save as the library did up to 0.7, with the embedding and the head of every drafter."""
    skipped = model._keys_to_ignore_on_save
    model.__dict__["_keys_to_ignore_on_save"] = [name for name in skipped if name not in PARTS]
    model.save_pretrained(folder)
    return folder


def inputs() -> tuple[torch.Tensor, ...]:
    """Return the tokens and the target's states of a row, and the block after ``ANCHOR`` tokens of it."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(1, LENGTH, 128, generator=generator)
    ids = torch.randint(VOCAB, (1, LENGTH), generator=generator)
    return ids, states, torch.cat([ids[:, ANCHOR : ANCHOR + 1], torch.ones(1, BLOCK - 1, dtype=torch.int64)], 1)


def their_block(model: DFlashDraftModel, ids: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the library's hidden states and logits of a block."""
    mask = torch.zeros(1, LENGTH).index_fill(1, torch.tensor(ANCHOR), 1)
    with torch.no_grad():
        hidden, logits, *_ = model.eval()._backbone_forward(
            states, ids, mask, torch.zeros(1, LENGTH, 64), torch.zeros(1, LENGTH, dtype=torch.int64), max_anchors=1
        )
    return hidden, logits


def our_block(draft: dflash.Drafter, target, states: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Return the hidden states of ``block`` after ``ANCHOR`` tokens."""
    cache, length = draft.new_cache(1, 32), torch.tensor([ANCHOR])
    features = draft.fuse(states[:, :ANCHOR], length)
    draft.inject_(features, torch.arange(ANCHOR)[None], cache)
    count = block.shape[1] - (0 if draft.config.predicts_from_anchor else 1)
    table, drafts = target.model.embed_tokens.weight, block.roll(-1, 1)[:, :count].contiguous()
    embeds, *_ = draft.embed_block(block, torch.zeros_like(length), count, table, drafts)
    return draft(features[:, :0], torch.tensor([0]), embeds, length, cache)


def compare_logits(model: DFlashDraftModel, draft: dflash.Drafter, target) -> tuple[torch.Tensor, ...]:
    """Check that a block after ``ANCHOR`` tokens has the library's hidden states and logits.

    Returns the anchor's token, then the library's hidden states and logits, and ours over the whole vocabulary.
    """
    ids, states, block = inputs()
    theirs, expected = their_block(model, ids, states)
    hidden = our_block(draft, target, states, block)
    torch.testing.assert_close(hidden, theirs, rtol=1e-4, atol=1e-4)
    logits = known = draft.logits(hidden, target.lm_head)
    if draft.config.draft_vocab_size is not None:
        assert logits.isfinite().sum() == logits[..., KNOWN].numel()
        known = logits[..., KNOWN]
    torch.testing.assert_close(known, expected, rtol=1e-4, atol=1e-4)
    return ids[:, ANCHOR], theirs, expected, logits


def compare_paths(model: DFlashDraftModel, draft: dflash.Drafter, target) -> None:
    """Check that the greedy tokens are those of the library's selector or Markov head, given the token before."""
    anchor, theirs, unary, logits = compare_logits(model, draft, target)
    first = 0 if model.config.sample_from_anchor else 1
    assert draft.config.rows_per_pass == BLOCK
    assert draft.config.block_size == BLOCK + 1 - first
    expected, previous = [], anchor
    for row in range(first, BLOCK):
        hidden, scores = theirs[:, row], unary[:, row]
        with torch.no_grad():
            if isinstance(model, DFlash2DraftModel):
                candidates, scores = model.candidate_selector.select(scores, hidden, previous)
                previous = candidates.gather(1, scores.argmax(-1, keepdim=True))[:, 0]
            else:
                if getattr(model, "markov_head", None) is not None:
                    scores = scores + model.markov_head.block_bias(
                        prev_token_ids=previous[None], hidden_states=hidden[None]
                    )[0]  # fmt: skip
                best = scores.argmax(-1)
                previous = best if model.d2t is None else best + model.d2t[best]
        expected.append(previous)
    drafts = logits[:, first:]
    if draft.selector is None:
        path = drafts.argmax(-1)
    else:
        linked = LinkedPredictions(drafts, draft.selector.pair_weights(theirs[:, first:]), anchor, draft.selector.top_k)
        positions = torch.arange(drafts.shape[1])[None]
        path = linked.draw(positions, Sampling.create(1))
    assert path.tolist() == torch.stack(expected, 1).tolist()


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


@pytest.mark.parametrize("non_causal", [False, True])
def test_a_window_ends_at_the_row_here_and_at_the_anchor_there(target, tmp_path, non_causal):
    """Row j sees j + 1 tokens less of the far end. With one layer, a window of that size gives the library's row j."""
    window = BLOCK + 2
    model = make(target, layer_types=["sliding_attention"], window=window, sliding_window_non_causal=non_causal)
    model.save_pretrained(tmp_path)
    ids, states, block = inputs()
    hidden = our_block(dflash.load_draft(tmp_path), target, states, block)
    for row in range(BLOCK):
        for less in (row, row + 1, row + 2):
            model.sliding_window = window - less
            theirs, _ = their_block(model, ids, states)
            assert torch.allclose(hidden[:, row], theirs[:, row], rtol=1e-4, atol=1e-4) == (less == row + 1)


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_a_saved_drafter_with_embedding_and_head_shares_the_targets(target, tmp_path, kind):
    model = make(target, kind)
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


@pytest.mark.parametrize(("kind", "changes"), [
    ("dflash2", {}),
    ("dflash2", {"layer_types": ["sliding_attention"] * 2}),
    ("dflash2", {"layer_types": ["sliding_attention"] * 2, "sliding_window_non_causal": False, "conv_kernel_size": 3}),
    ("dflash2", {"sample_from_anchor": True, "conv_group_size": 8}),
    ("dspark", {}),
    ("dspark", {"reduced": True}),
    ("dspark", {"sample_from_anchor": False}),
    ("dspark", {"markov_rank": 0, "confidence_head_with_markov": False}),
    ("dspark", {"enable_confidence_head": False, "layer_types": ["sliding_attention", "full_attention"]}),
], ids=str)  # fmt: skip
def test_a_saved_drafter_takes_the_same_path(target, tmp_path, kind, changes):
    model = make(target, kind, **changes)
    model.save_pretrained(tmp_path)
    draft = dflash.load_draft(tmp_path)
    if kind == "dflash2":
        assert draft.config.dflash2.conv_group_size == changes.get("conv_group_size", 16)
    compare_paths(model, draft, target)
    ids = torch.arange(9)[None] + 3
    answers = [dflash.generate(target, each, ids, max_new_tokens=20) for each in (draft, None)]
    assert torch.equal(*answers)


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_what_a_config_leaves_out_is_the_librarys_default(target, kind):
    written = make(target, kind).config.to_dict()
    written["speculators_config"]["proposal_methods"] = []  # a number of drafts there would say it
    for name in ("sample_from_anchor", "sliding_window_non_causal", *TYPES[kind][2], "conv_kernel_size"):
        written.pop(name, None)
    written["transformer_layer_config"] |= {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}
    written["transformer_layer_config"] |= {"sliding_window": 32, "vocab_size": 300, "hidden_size": 64}
    read, default = DraftConfig.from_config(written | {"draft_vocab_size": 300}), TYPES[kind][0]()
    assert read.causal == (not default.sliding_window_non_causal,) * 2
    assert read.predicts_from_anchor == default.sample_from_anchor
    assert read.markov_rank == getattr(default, "markov_rank", 0)
    if kind == "dflash2":
        assert read.dflash2 == dflash.drafter.DFlash2Config(
            default.conv_kernel_size, default.conv_group_size, default.selector_rank, default.selector_top_k
        )


@pytest.mark.parametrize("drafts", [BLOCK - 1, BLOCK])
def test_old_files_say_by_their_number_of_drafts_which_row_is_the_first(target, drafts):
    written = make(target, "dspark").config.to_dict()
    del written["sample_from_anchor"]
    written["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = drafts
    assert DraftConfig.from_config(written).predicts_from_anchor == (drafts == BLOCK)


@pytest.mark.parametrize("kinds", ["ff", "ss"])
def test_specforges_dspark_gives_the_same_hidden_states_and_scores(target, tmp_path, kinds):
    types = [{"f": "full_attention", "s": "sliding_attention"}[kind] for kind in kinds]
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=88, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, layer_types=types, use_sliding_window="s" in kinds, sliding_window=32,
        block_size=BLOCK, num_target_layers=4, architectures=["DSparkDraftModel"], max_window_layers=0,
        dflash_config={
            "projector_type": "dspark", "mask_token_id": 1, "target_layer_ids": [1, 3], "markov_rank": 8,
            "markov_head_type": "vanilla", "confidence_head_alpha": 1.0, "confidence_head_with_markov": True,
        },
    )  # fmt: skip
    config._attn_implementation = "eager"
    model, generator = specforge.DSparkDraftModel(config).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(values / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else 1 + values / 4)
    model.save_pretrained(tmp_path)
    draft = dflash.load_draft(tmp_path)
    _, states, block = inputs()
    positions, embeds = torch.arange(ANCHOR + BLOCK), target.model.embed_tokens(block)
    unseen = positions > positions[ANCHOR:, None] if "s" in kinds else torch.zeros(BLOCK, ANCHOR + BLOCK).bool()
    mask = torch.zeros(1, 1, BLOCK, ANCHOR + BLOCK).masked_fill(unseen, -torch.inf)
    with torch.no_grad():
        theirs = model(positions[None], mask, embeds, states[:, :ANCHOR], is_causal=False)
        bias = model.markov_head.compute_step_bias(block, theirs)
    hidden = our_block(draft, target, states, block)
    torch.testing.assert_close(hidden, theirs, rtol=1e-4, atol=1e-4)
    weights = draft.selector.pair_weights(hidden)
    ours = (weights.predecessors[block] * weights.queries) @ weights.successors.T
    torch.testing.assert_close(ours, bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "second"), [*((kind, "sliding") for kind in TYPES), ("dspark", "full")])
def test_an_export_is_loaded_by_the_library_and_takes_the_same_path(target, tmp_path, kind, second):
    make(target, kind, layer_types=["sliding_attention", f"{second}_attention"]).save_pretrained(tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "published", "published")
    export(tmp_path / "published", tmp_path / "out", "speculators", target="owner/target")
    config_class, model_class, _ = TYPES[kind]
    config = config_class.from_pretrained(tmp_path / "out")
    config.transformer_layer_config._attn_implementation = "eager"
    model = model_class(config)
    stored = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    missing, unexpected = model.load_state_dict(stored, strict=False)
    assert not unexpected
    assert set(missing) <= {*PARTS, "t2d", "d2t", "verifier_lm_head.weight", "verifier_norm.weight"}
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        model.lm_head.weight.copy_(target.lm_head.weight)
    compare_paths(model, dflash.load_draft(tmp_path / "out"), target)
