"""Compare the drafter with the reference package ``dflash==0.1.0``: same checkpoint and features, same hidden states.

A wrong mask inside the block does not show in acceptance, but it does in hidden states.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from draft_variants import DFLASH2_VARIANTS, VARIANTS, random_drafter, random_tensors, save_checkpoint
from op_checks import assert_as_exact_as_torch
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from dflash import DraftConfig, Drafter, load_draft
from dflash.proposers import LinkedPredictions
from dflash.sampling import Sampling

PROMPTS = (5, 19)
EVERY = VARIANTS | DFLASH2_VARIANTS
STEPS = 6
CAPACITY = 160


def as_reference(package, config: dict, tensors: dict):
    """Return the reference package's model. It ignores ``dflash_config.causal``, so it gets that as ``is_causal``."""
    config = copy.deepcopy(config)
    causal = config["dflash_config"].pop("causal", None)
    if causal is not None:
        config.setdefault("is_causal", causal)
    kind = package.DFlashDraftModel if config["architectures"] == ["DFlashDraftModel"] else package.DFlash2DraftModel
    model = kind(Qwen3Config(**config)).eval()
    names = {name: f"{name}.weight" if name.endswith("codebook") else name for name in tensors}
    model.load_state_dict({names[name]: tensor for name, tensor in tensors.items()}, strict=True)
    return model


def in_float64(model):
    """Return a float64 copy. transformers' norms compute in float32, so they are replaced."""
    model = copy.deepcopy(model).double()
    for module in model.modules():
        if isinstance(module, Qwen3RMSNorm):
            module.forward = lambda x, m=module: m.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    return model


def simulate(package, config: dict, *, folder, seed=0):
    """Generate with both drafters, a batch of two ragged rows with ours: yields ``(ours, theirs, exact)`` per step.

    Row b accepts a random number of rows each step. Ours runs on device-side lengths and a cache full of NaN;
    the reference on its own cache, one row at a time; ``exact`` recomputes the row from nothing in float64.
    """
    generator = torch.Generator().manual_seed(seed)
    parsed = DraftConfig.from_config(config)
    tensors = random_tensors(parsed, seed)
    draft = Drafter(parsed)
    draft.load_state_dict(load_draft(save_checkpoint(folder, config, tensors)).state_dict())
    model = as_reference(package, config, tensors)
    exact_model = in_float64(model)
    rows, hidden = parsed.block_size, parsed.hidden_size
    states = torch.randn(2, CAPACITY, len(parsed.target_layer_ids) * hidden, generator=generator)

    cache = draft.new_cache(2, CAPACITY)
    for buffer in cache.buffers:
        buffer.fill_(float("nan"))
    length = torch.tensor(PROMPTS)
    for start in range(0, max(PROMPTS), 8):  # prefill in chunks; a row that has ended is off
        positions = torch.arange(start, start + 8).expand(2, -1)
        live = positions < length[:, None]
        chunk = torch.where(live[..., None], states[:, start : start + 8], float("nan"))
        draft.inject_(draft.fuse(chunk, live.sum(1)), torch.where(live, positions, -1), cache)

    theirs_cache = [package._make_cache(model.config) for _ in PROMPTS]
    length, num_context = list(PROMPTS), [0, 0]
    for _ in range(STEPS):
        embeds = draft.scale_embeddings(torch.randn(2, rows, hidden, generator=generator))
        context = torch.full((2, rows, states.shape[-1]), float("nan"))
        for row, count in enumerate(num_context):
            context[row, :count] = states[row, length[row] - count : length[row]]
        counts, lengths = torch.tensor(num_context), torch.tensor(length)
        ours = draft(draft.fuse(context, counts), counts, embeds, lengths, cache)
        for row, end in enumerate(length):
            begin = end - num_context[row] if theirs_cache[row].get_seq_length() else 0
            theirs = model(
                target_hidden=states[row : row + 1, begin:end],
                noise_embedding=embeds[row : row + 1],
                position_ids=torch.arange(begin, end + rows)[None],
                past_key_values=theirs_cache[row],
                use_cache=True,
            )
            package._crop_to(theirs_cache[row], end)
            exact = exact_model(
                target_hidden=states[row : row + 1, :end].double(),
                noise_embedding=embeds[row : row + 1].double(),
                position_ids=torch.arange(end + rows)[None],
            )
            yield ours[row], theirs[0], exact[0]
        num_context = torch.randint(1, rows + 1, (2,), generator=generator).tolist()
        length = [end + count for end, count in zip(length, num_context, strict=True)]


@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_hidden_states_are_equal_at_every_step(reference_package, name, tmp_path):
    for ours, theirs, exact in simulate(reference_package, EVERY[name], folder=tmp_path):
        assert exact.dtype == torch.float64
        assert_as_exact_as_torch(ours, theirs, exact, factor=4.0 if name in DFLASH2_VARIANTS else 2.0)


@pytest.mark.parametrize("name", ["Gemma4-31B", "is_causal-false-with-window", "Qwen3-4B"])
@torch.no_grad()
def test_logits_and_embeddings_are_equal(reference_package, name, tmp_path):
    config, head = VARIANTS[name], torch.nn.Linear(64, 50, bias=False)
    tensors = random_tensors(DraftConfig.from_config(config))
    draft = load_draft(save_checkpoint(tmp_path, config, tensors))
    model = as_reference(reference_package, config, tensors)
    hidden = 20 * torch.randn(2, 7, 64)
    assert torch.equal(draft.logits(hidden, head), model.compute_logits(hidden, head))
    target = SimpleNamespace(get_input_embeddings=lambda: embedding)
    embedding, ids = torch.nn.Embedding(101, 64), torch.tensor([[3, 100, 100]])
    scale = float(reference_package._draft_value(model.config, "input_embedding_scale", 1.0))
    assert torch.equal(
        draft.scale_embeddings(embedding(ids)), reference_package._raw_input_embeddings(target, ids, scale)
    )


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("name", DFLASH2_VARIANTS)
@torch.no_grad()
def test_greedy_paths_are_equal(reference_package, name, batch):
    """The logits go through the head, the multiplier and the softcap; blocks are as long as trained and shorter."""
    config = DFLASH2_VARIANTS[name]
    parsed = DraftConfig.from_config(config)
    tensors = random_tensors(parsed)
    draft, model = random_drafter(config), as_reference(reference_package, config, tensors)
    generator = torch.Generator().manual_seed(batch)
    head = torch.nn.Linear(parsed.hidden_size, parsed.vocab_size, bias=False)
    torch.nn.init.normal_(head.weight, std=0.3, generator=generator)
    sampling = Sampling.create(batch)
    for rows in range(1, parsed.block_size):
        hidden = torch.randn(batch, rows, parsed.hidden_size, generator=generator)
        anchor = torch.randint(parsed.vocab_size, (batch,), generator=generator)
        theirs = model.propose(hidden, anchor, head, 0.0)[0]
        logits, pairs = draft.logits(hidden, head), draft.candidate_selector.pair_weights(hidden)
        predictions = LinkedPredictions(logits, pairs, anchor, parsed.dflash2.selector_top_k)
        positions = torch.arange(rows).expand(batch, -1)
        assert torch.equal(predictions.draw(positions, sampling), theirs)
    assert not torch.equal(logits.argmax(-1), theirs), "the pair scores should matter"


@pytest.mark.parametrize("name", EVERY)
def test_the_weights_of_its_module_are_copied(reference_package, name, tmp_path):
    config = EVERY[name]
    parsed = DraftConfig.from_config(config)
    tensors = random_tensors(parsed)
    model = as_reference(reference_package, config, tensors)
    draft = load_draft(model)
    assert draft.config == parsed
    state = draft.state_dict()
    assert state.keys() == tensors.keys()
    assert all(torch.equal(state[key], tensors[key]) for key in tensors)
    with torch.no_grad():
        draft.fc.weight.zero_()
    assert torch.equal(model.fc.weight, tensors["fc.weight"])
    assert load_draft(model, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert model.dtype == torch.float32
