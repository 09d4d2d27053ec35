import pytest
import torch
from op_checks import Emulated, same
from torch import nn

pytestmark = pytest.mark.op

BATCH, CAPACITY, VOCAB, MASK = 3, 20, 50, 7
LENGTH = torch.tensor([0, 11, 19])


def draw(hidden=48, dtype=torch.float32, seed=0):
    """Tokens, the embeddings and one of a mask's own."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (BATCH, CAPACITY), generator=g)
    return tokens, torch.randn(VOCAB, hidden, generator=g).to(dtype), torch.randn(hidden, generator=g).to(dtype)


def with_torch(tokens, drafts, table, rows, mask_embedding, scale):
    """What the op returns, by torch's lookup."""
    anchor = tokens[range(BATCH), LENGTH]
    ids = torch.cat([anchor[:, None], drafts], 1)
    embeds = nn.functional.embedding(ids[:, :rows], table)
    if mask_embedding is not None:
        embeds = torch.where((ids[:, :rows] == MASK)[..., None], mask_embedding, embeds)
    return embeds * scale, anchor, LENGTH[:, None] + torch.arange(1, drafts.shape[1] + 1)


@pytest.mark.parametrize("hidden", [1, 24, 100, 4096])
@pytest.mark.parametrize("own_mask", [False, True])
@pytest.mark.parametrize("scale", [1.0, 2.7])
def test_the_bits_are_those_of_torch(hidden, own_mask, scale, dtype, implementation):
    tokens, table, mask = draw(hidden, dtype)
    mask = mask if own_mask else None
    for num_drafts, rows in ((5, 6), (5, 5), (0, 1), (3, 0)):
        masks = torch.full((BATCH, num_drafts), MASK)
        some = torch.where(torch.arange(num_drafts) % 2 == 0, tokens[:, 3 : 3 + num_drafts], masks)
        for drafts, given in ((masks, None), (some, some)):
            out = implementation.draft_rows(tokens, LENGTH, given, table, MASK, num_drafts, rows, mask, scale)
            assert same(out, with_torch(tokens, drafts, table, rows, mask, scale))


def test_an_anchor_that_is_the_mask_has_its_embedding(implementation):
    tokens, table, mask = draw()
    tokens[1, LENGTH[1]] = MASK
    embeds, *_ = implementation.draft_rows(tokens, LENGTH, None, table, MASK, 2, 3, mask)
    assert torch.equal(embeds[1], mask.expand(3, -1))
    assert torch.equal(embeds[0, 0], table[tokens[0, 0]])


def test_a_mask_of_its_own_needs_no_row_of_the_table(implementation):
    tokens, table, mask = draw()
    embeds, *_ = implementation.draft_rows(tokens, LENGTH, None, table, VOCAB + 3, 2, 3, mask)
    assert torch.equal(embeds[:, 1:], mask.expand(BATCH, 2, -1))


def test_ids_and_lengths_outside_count_as_the_nearest(implementation):
    tokens, table, _ = draw()
    drafts = torch.tensor([[-1, VOCAB], [-(2**63), 2**63 - 1], [0, VOCAB - 1]])
    lengths = torch.tensor([-(2**63), 2**63 - 1, CAPACITY])
    embeds, anchor, positions = implementation.draft_rows(tokens, lengths, drafts, table, MASK, 2, 3)
    assert torch.equal(embeds[:, 1:], table[[0, -1]].expand(BATCH, -1, -1))
    assert torch.equal(anchor, tokens[range(BATCH), [0, -1, -1]])
    assert positions[:, 0].tolist() == [1, CAPACITY, CAPACITY]


def test_inputs_may_be_strided_or_off_by_an_element(kernels):
    tokens, table, mask = draw()
    drafts = tokens[:, 5:8].contiguous()
    want = kernels.draft_rows(tokens, LENGTH, drafts, table, MASK, 3, 4, mask)
    wide, shifted = torch.zeros(VOCAB, 2 * 48 + 5), torch.zeros(VOCAB * 48 + 1)[1:].view(VOCAB, 48)
    for one in (wide[:, 7 : 7 + 48], shifted, table.t().contiguous().t()):
        one.copy_(table)
        strided = [x.t().contiguous().t() for x in (tokens, drafts)]
        spread = torch.stack([mask, mask], 1)[:, 0]
        assert same(kernels.draft_rows(strided[0], LENGTH, strided[1], one, MASK, 3, 4, spread), want)


@pytest.mark.parametrize("seed", range(3))
def test_emulated_kernels_behind_it_may_read_early_what_was_accepted_before_it(seed, emulation):
    """It lets the next kernel start after its own wait, so a rotation behind it may read the lengths early."""
    kernels, g = Emulated(emulation), torch.Generator().manual_seed(0)
    tokens, table, _ = draw(64)
    block, choices = tokens[:, :4].contiguous(), tokens[:, 1:5].contiguous()
    qkv, norm, angles = torch.randn(BATCH, 4, 8 * 16, generator=g), torch.ones(16), torch.rand(2, 30, 8, generator=g)
    stops, limits = torch.full((BATCH, 1), -2), torch.full((BATCH,), 19)

    def run():
        state = tokens.clone(), torch.tensor([3, 5, 9]), *torch.zeros(2, BATCH, dtype=torch.int64)
        queries, *caches = qkv.new_zeros(BATCH, 4, 2, 16), *qkv.new_zeros(2, BATCH, 1, 30, 16)
        kernels.accept_prefix_(block, choices, stops, limits, *state)
        embeds, *rest = kernels.draft_rows(state[0], state[1], None, table, MASK, 3, 4)
        x = kernels.silu_mul(qkv)
        places = (state[1], None, None, *angles)
        kernels.qkv_norm_rope_append_(x, *places, norm, norm, 1e-6, queries, *caches, prefetch=True)
        return embeds, *rest, queries, *caches, *state, x

    kernels.check_overlapping(run, seed)
