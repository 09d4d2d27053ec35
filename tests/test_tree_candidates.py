import math

import pytest
import torch
from op_checks import same

from dflash import ops
from dflash.ops import reference

pytestmark = pytest.mark.op

INFINITY = math.inf
MIXED = [0.0, 1.0, 0.7, 2.0, -1.0, 0.3]  # temperatures
TOLERANCE = 2e-6  # of a score, relative to its size or to 1


def draw_case(seed, vocab, batch=6, depths=3, scale=3.0, temperature=MIXED):
    """Logits, positions, seeds and temperatures."""
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, depths, vocab, generator=g) * scale,
        torch.randint(2**40, (batch, depths), generator=g),
        torch.randint(-(2**63), 2**63 - 1, (batch,), generator=g),
        torch.tensor((temperature * batch)[:batch]),
    )


def exact_scores(logits, positions, seeds, temperature, noise_weight=0.1):
    """Scores of all tokens in float64, as logarithms: some probabilities are below the smallest float."""
    z = logits.double()
    noise = reference.gumbel_noise(seeds, positions, z.shape[-1]).double()
    heat = temperature.double().clamp(max=3e38)[:, None, None]
    plain, noisy = z.log_softmax(-1), ((z - z.amax(-1, keepdim=True)) / heat + noise).log_softmax(-1)
    shares = torch.tensor([1 - noise_weight, noise_weight], dtype=torch.float64).log()
    return torch.where(heat > 0, torch.logaddexp(plain + shares[0], noisy + shares[1]), plain)


def assert_best(ids, scores, exact, tolerance=TOLERANCE):
    """The tokens and scores are the best by exact scores, up to rounding; ties go to the lower id."""
    count = min(ids.shape[-1], exact.shape[-1])
    best = exact.sort(dim=-1, descending=True, stable=True).values[..., :count]
    dead = best == -INFINITY
    assert torch.equal(ids[..., :count] < 0, dead)
    assert torch.equal(scores[..., :count] == -INFINITY, dead)
    assert (ids[..., count:] == -1).all()
    assert (scores[..., count:] == -INFINITY).all()
    live, ids, scores = ~dead, ids[..., :count], scores[..., :count]
    room = tolerance * best.abs().clamp(min=1)
    assert ((scores - best).abs() <= room)[live].all()  # the k-th score is the k-th best
    assert ((scores - exact.gather(-1, ids.clamp(min=0))).abs() <= room)[live].all()  # and that of its token
    assert (torch.where(live, ids, -1 - torch.arange(count)).sort(-1).values.diff() != 0).all()
    assert (scores[..., :-1] >= scores[..., 1:]).all()
    tied = (scores[..., :-1] == scores[..., 1:]) & live[..., 1:]
    assert (ids[..., :-1] < ids[..., 1:])[tied].all()
    assert (scores <= 0).all()


@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 65, 113, 512, 3001])
def test_candidates_are_the_best_of_exact_scores(vocab, dtype, implementation):
    for seed, count in enumerate((1, 16, 100) if vocab > 100 else (1, 4, 32)):
        logits, *rest = draw_case(seed, vocab, depths=1 if vocab > 1000 else 3)
        logits = logits.to(dtype)
        assert_best(*implementation.tree_candidates(logits, *rest, count), exact_scores(logits, *rest))


def test_candidates_of_a_full_vocabulary(kernels):
    logits, *rest = draw_case(1, 151936, 2, 1, temperature=[1.0, 0.0])
    for x in (logits, logits.bfloat16()):
        assert_best(*kernels.tree_candidates(x, *rest, 32), exact_scores(x, *rest), 5e-6)


def test_the_noise_weight_goes_from_the_draft_alone_to_the_noise_alone(implementation):
    case = draw_case(4, 300)
    for weight in (0.0, 0.5, 1.0):
        ids, scores = implementation.tree_candidates(*case, 16, weight)
        assert_best(ids, scores, exact_scores(*case, weight))
    cold = implementation.tree_candidates(*case[:3], torch.zeros(6), 16)
    assert same(implementation.tree_candidates(*case, 16, 0.0), cold)


def test_with_the_noise_alone_the_first_candidate_is_the_sampled_token(kernels):
    logits, positions, seeds, _ = draw_case(5, 400, 8)
    ones = torch.ones(8)
    ids, _ = kernels.tree_candidates(logits, positions, seeds, ones, 4, 1.0)
    none = torch.zeros(8, dtype=torch.int64)
    assert torch.equal(ids[..., 0], ops.select_tokens(logits, positions, seeds, ones, none, ones, ones * 0, ones))


@pytest.mark.parametrize(
    ("scale", "temperature"),
    [*((scale, MIXED) for scale in (1e-3, 30.0, 1000.0)), *((3.0, [t]) for t in (1e-30, 1e-3, 1e30, INFINITY))],
)
def test_extreme_logits_and_temperatures(scale, temperature, implementation):
    case = draw_case(6, 200, scale=scale, temperature=temperature)
    assert_best(*implementation.tree_candidates(*case, 16), exact_scores(*case))


def test_equal_logits_give_the_lowest_ids(implementation):
    _, *rest = draw_case(0, 1000, temperature=[0.0])
    ids, scores = implementation.tree_candidates(torch.zeros(6, 3, 1000), *rest, 70)
    assert torch.equal(ids, torch.arange(70).expand(6, 3, 70))
    assert torch.allclose(scores, torch.tensor(-math.log(1000)))


def best_anywhere():
    """Logits whose best are all in one place, or far apart, or in rising or falling order."""
    rising, tokens = torch.linspace(-20, 0, 2000), torch.arange(2000)
    comb = torch.where(tokens % 64 == 7, rising + 5, rising - 9)
    front = torch.where(tokens < 40, 3.0, -3.0) + rising * 1e-3
    return torch.stack([rising, rising.flip(0), comb, front])[:, None].contiguous()


def test_the_best_tokens_may_lie_anywhere(kernels):
    logits, (_, positions, seeds, _) = best_anywhere(), draw_case(7, 10, 4, 1)
    for temperature in (0.0, 1.0):
        rest = positions, seeds, torch.full((4,), temperature)
        for count in (3, 32, 128):
            assert_best(*kernels.tree_candidates(logits, *rest, count), exact_scores(logits, *rest))


def test_tokens_of_minus_infinity_are_left_out(implementation):
    logits, *rest = draw_case(8, 150)
    few = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.05
    logits = logits.masked_fill(~few, -INFINITY)
    logits[0, 0] = -INFINITY
    ids, scores = implementation.tree_candidates(logits, *rest, 16)
    assert (ids[0, 0] == -1).all()
    assert (scores[0, 0] == -INFINITY).all()
    ids[0, 0], scores[0, 0], logits[0, 0] = ids[0, 1], scores[0, 1], logits[0, 1]
    exact = exact_scores(logits, *rest)
    exact[0, 0] = exact[0, 1]
    assert_best(ids, scores, exact)


@pytest.mark.parametrize("name", ["tree_candidates", "top_candidates"])
def test_a_row_with_nan_has_no_candidates_and_no_other_row_changes(name, implementation):
    logits, *rest = draw_case(9, 130)
    op, rest = getattr(implementation, name), [*rest, *([torch.tensor([INFINITY, 2, 1] * 2)] if "top" in name else [])]
    ids, scores = op(logits, *rest, 8)
    spoilt = logits.clone()
    spoilt[0, 1, 129] = spoilt[1, 0, 3] = spoilt[4, 2, 64] = math.nan
    dead = spoilt.isnan().any(-1)
    new_ids, new_scores = op(spoilt, *rest, 8)
    assert (new_ids[dead] == -1).all()
    assert (new_scores[dead] == -INFINITY).all()
    assert torch.equal(new_ids[~dead], ids[~dead])
    assert torch.equal(new_scores[~dead], scores[~dead])


def test_infinite_logits_share_the_probability(implementation):
    logits, *rest = draw_case(10, 100, temperature=[0.0, 1.0])
    logits[..., [90, 7]] = INFINITY
    ids, scores = implementation.tree_candidates(logits, *rest, 4)
    assert torch.equal(ids[..., :2].sort(-1).values, torch.tensor([7, 90]).expand(6, 3, 2))
    assert (ids[..., 2:] == -1).all()
    cold = scores[::2, :, :2]
    assert torch.allclose(cold, torch.tensor(-math.log(2)))
    assert (scores[1::2, :, :2].exp().sum(-1) - 1).abs().max() < 1e-6


def test_a_row_does_not_depend_on_its_place(kernels):
    case = draw_case(13, 700)
    ids, scores = kernels.tree_candidates(*case, 16)
    for b in range(6):
        alone = kernels.tree_candidates(*(x[b : b + 1] for x in case), 16)
        assert torch.equal(alone[0][0], ids[b])
        assert torch.equal(alone[1][0], scores[b])
