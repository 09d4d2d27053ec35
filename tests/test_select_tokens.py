import math

import pytest
import scipy.stats
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dflash import ops
from dflash.ops import reference

pytestmark = pytest.mark.op

INT64 = (-(2**63), 2**63 - 1)
MASK = 0xFFFFFFFF


def parameters(batch, seeds, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, sharpness=1.0):
    """The six per-row tensors of select_tokens; numbers fill every row."""

    def rows(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(batch).contiguous()

    real, whole = torch.float32, torch.int64
    return (
        rows(seeds, whole), rows(temperature, real), rows(top_k, whole),
        rows(top_p, real), rows(min_p, real), rows(sharpness, real),
    )  # fmt: skip


def draw_case(seed, vocab, batch=12, rows=2):
    """Random logits (ties, infinities and NaN among them) and parameters of every kind."""
    g = torch.Generator().manual_seed(seed)

    def chance(*shape):
        return torch.rand(shape, generator=g)

    def pick(choices):
        return torch.tensor(choices)[torch.randint(len(choices), (batch,), generator=g)]

    logits = torch.randn(batch, rows, vocab, generator=g) * 10 ** (chance(batch, 1, 1) * 4 - 2)
    kind = seed % 6
    if kind in (1, 2):
        logits = logits.round()
    if kind in (2, 3):
        logits = logits.masked_fill(chance(*logits.shape) < 0.4, -math.inf)
    if kind == 4:
        logits = logits.masked_fill(chance(*logits.shape) < 0.02, math.inf)
        logits[0], logits[1], logits[2], logits[3] = -math.inf, 0.0, logits[2] * 1e37, -logits[2].abs() * 1e37
    if kind == 5:
        logits = logits.masked_fill(chance(*logits.shape) < 1 / vocab, math.nan)
    temperature = torch.where(chance(batch) < 0.3, chance(batch) * 2, pick([0.0, 0.01, 0.7, 1.0, 1.0, 50.0, 1e-30]))
    top_p = torch.where(chance(batch) < 0.3, chance(batch), pick([1.0, 1.0, 0.99, 0.9, 0.5, 1e-6, 0.0]))
    return (
        logits, torch.randint(-(2**40), 2**40, (batch, rows), generator=g),
        torch.randint(*INT64, (batch,), generator=g), temperature,
        pick([0, 0, 1, 2, 5, 50, vocab - 1, vocab, vocab + 1, -3]), top_p, pick([0.0, 0.0, 0.01, 0.1, 0.5, 1.0, 1e-30]),
        pick([1.0, 1.0, 1.0, 3.0, 0.5, 0.0, math.inf]),
    )  # fmt: skip


@pytest.mark.parametrize("vocab", [1, 2, 5, 63, 64, 65, 113, 512, 32000])
def test_kernel_equals_twin(vocab, dtype, kernels):
    for seed in range(6 if vocab > 1000 else 24):
        logits, *rest = draw_case(seed, vocab, *((6, 1) if vocab > 1000 else ()))
        logits = logits.to(dtype)
        assert torch.equal(kernels.select_tokens(logits, *rest), reference.select_tokens(logits, *rest)), seed


def test_kernel_equals_twin_on_a_full_vocabulary(kernels):
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 1, 151936, generator=g) * 3
    settings = parameters(
        4, [1, 2, -3, 4], [1.0, 0.7, 1.0, 1.0], [0, 20, 0, 4000], [1.0, 0.95, 0.9, 1.0], [0, 0, 0, 1e-3]
    )
    positions = torch.tensor([[0], [2**33 + 1], [7], [8]])
    for x in (logits, logits.bfloat16()):
        assert torch.equal(
            kernels.select_tokens(x, positions, *settings), reference.select_tokens(x, positions, *settings)
        )


def test_every_way_to_a_threshold_equals_the_twin(dtype, kernels):
    """Rows of several slices, each with every mix of filters: few tokens and many, ties, and thresholds near zero."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(9000, generator=g)
    masked = x.masked_fill(torch.rand(9000, generator=g) < 0.999, -math.inf)
    rows = torch.stack([x * 3, x * 0.1, x.round(), x * 0 + 2.5, masked, x * 300 - 40, x.masked_fill(x > 3.5, math.inf)])
    settings = parameters(
        10, torch.arange(10), [1.0, 0.7, 1.0, 1.0, 1.0, 50.0, 1e-3, 1.0, 1e30, 1.0],
        [0, 20, 36, 37, 2000, 0, 3, 0, 9, 30], [0.9, 1.0, 0.9, 1.0, 0.8, 0.999, 0.5, 1.0, 0.3, 1.0],
        [0, 0, 0, 0, 1e-3, 0.01, 0, 0.05, 0, 0.1],
        [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0],
    )  # fmt: skip
    positions = torch.arange(70).view(10, 7)
    logits = rows.to(dtype).expand(10, 7, 9000).contiguous()
    assert torch.equal(
        kernels.select_tokens(logits, positions, *settings), reference.select_tokens(logits, positions, *settings)
    )


def slow_philox(counter, key):
    counter, key = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [p1 >> 32 ^ counter[1] ^ key[0], p1 & MASK, p0 >> 32 ^ counter[3] ^ key[1], p0 & MASK]
        key = [(key[0] + 0x9E3779B9) & MASK, (key[1] + 0xBB67AE85) & MASK]
    return counter


def slow_noise(seed, position, token):
    key = (seed & MASK, seed >> 32 & MASK)
    words = slow_philox((token >> 2, position & MASK, position >> 32 & MASK, 0), key)
    return -math.log(-math.log1p(-(words[token & 3] + 0.5) * 2.0**-32))


def slow_select(logits, position, seed, temperature, top_k, top_p, min_p, sharpness):
    if any(math.isnan(x) for x in logits):
        return -1
    tokens = range(len(logits))
    if temperature == 0 or sharpness == math.inf:
        return max(tokens, key=lambda i: (logits[i], -i))
    z = [x / temperature for x in logits]
    kept = set(tokens)
    if 0 < top_k < len(z):
        kept = {i for i in kept if z[i] >= sorted(z)[-top_k]}
    weight = {i: math.exp(z[i] - max(z)) for i in kept}
    if top_p < 1:
        total = sum(weight.values())
        kept = {i for i in kept if sum(w for j, w in weight.items() if z[j] > z[i]) < top_p * total}
    if min_p > 0:
        kept = {i for i in kept if weight[i] >= min_p}
    return max(kept, key=lambda i: (sharpness * z[i] + slow_noise(seed, position, i), -i))


def test_philox_known_answers():
    """The vectors that Random123 ships (kat_vectors, philox4x32 10)."""
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
    for (*counter, k0, k1), wanted in (
        ([0] * 6, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([MASK] * 6, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (pi, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ):
        assert " ".join(f"{word:08x}" for word in slow_philox(counter, (k0, k1))) == wanted


def test_against_the_definition(implementation):
    select = implementation.select_tokens
    g = torch.Generator().manual_seed(5)
    logits = torch.randn(60, 1, 113, generator=g) * 4
    logits[3, 0, 7] = logits[4, 0, 100] = math.nan
    logits[5, 0, 50:] = -math.inf
    seeds = torch.randint(*INT64, (60,), generator=g)
    positions = torch.randint(*INT64, (60, 1), generator=g)
    cycle = torch.arange(60)
    temperature = torch.tensor([1.0, 0.0, 0.5, 2.0])[cycle % 4]
    top_k = torch.tensor([0, 7, 30])[cycle % 3]
    top_p = torch.tensor([1.0, 0.8, 0.5, 0.99, 0.1])[cycle % 5]
    min_p = torch.tensor([0.0, 0.25])[cycle // 7 % 2]
    sharpness = torch.tensor([1.0, 3.0, 1.0, math.inf, 0.5, 1.0, 2.0])[cycle % 7]
    rest = (seeds, temperature, top_k, top_p, min_p, sharpness)
    expected = [
        slow_select(row[0], position[0], *each)
        for row, position, *each in zip(logits.tolist(), positions.tolist(), *(x.tolist() for x in rest), strict=True)
    ]
    assert select(logits, positions, *rest)[:, 0].tolist() == expected


# An argmax hardly ever shows the last bit, so each is driven to where it decides.
def assert_flips_at_the_same_bits(kernels, batch, low, high, arguments, wanted):
    """Bisect between the positive floats ``low`` and ``high`` (one per row) to where the twin's choice becomes
    ``wanted``; the kernel's must on the same two neighbours. Rows that do not flip in between are left out."""

    def chosen(select, bits):
        return select(*arguments(bits.view(torch.float32)))[:, 0] == wanted

    low, high = (torch.full((batch,), x).view(torch.int32) for x in (low, high))
    live = chosen(reference.select_tokens, high) & ~chosen(reference.select_tokens, low)
    assert live.sum() > batch // 4
    while (high - low).max() > 1:
        middle = low + (high - low) // 2
        up = chosen(reference.select_tokens, middle)
        low, high = torch.where(up, low, middle), torch.where(up, middle, high)
    assert chosen(kernels.select_tokens, high)[live].all()
    assert not chosen(kernels.select_tokens, low)[live].any()


def test_scores_have_the_bits_of_the_twin(kernels):
    g = torch.Generator().manual_seed(8)
    batch = 400
    seeds, positions = torch.arange(batch), torch.full((batch, 1), 5)
    temperature = torch.rand(batch, generator=g) + 0.5
    sharpness = torch.rand(batch, generator=g) * 2 + 0.7

    def arguments(logit):
        logits = torch.stack([torch.full_like(logit, 9.0), logit], -1)[:, None]
        return logits, positions, *parameters(batch, seeds, temperature, sharpness=sharpness)

    assert_flips_at_the_same_bits(kernels, batch, 0.01, 60.0, arguments, 1)


def test_exponentials_have_the_bits_of_the_twin(kernels):
    batch = 1000
    depth = torch.linspace(1e-3, 85.0, batch)
    logits = torch.stack([torch.zeros(batch), -depth], -1)[:, None]

    def arguments(min_p):
        return (
            logits,
            torch.zeros(batch, 1, dtype=torch.int64),
            *parameters(batch, torch.arange(batch), min_p=min_p, sharpness=0.0),
        )

    assert_flips_at_the_same_bits(kernels, batch, 1e-38, 1.0, arguments, 0)


def test_probabilities_have_the_bits_of_the_twin(kernels):
    batch, vocab = 200, 50
    logits = torch.randn(batch, 1, vocab, generator=torch.Generator().manual_seed(9)) * 3
    positions, seeds = torch.zeros(batch, 1, dtype=torch.int64), torch.arange(batch)
    noisiest = reference.gumbel_noise(seeds, positions, vocab)[:, 0].argmax(-1)

    def arguments(top_p):
        return logits, positions, *parameters(batch, seeds, top_p=top_p, sharpness=0.0)

    assert_flips_at_the_same_bits(kernels, batch, 1e-6, 0.9999999, arguments, noisiest)


def test_noise_is_a_function_of_seed_position_and_token():
    seeds, positions = torch.tensor([9, 9 + 2**32, -9]), torch.tensor([[4, 4 + 2**32, -4]] * 3)
    noise = reference.gumbel_noise(seeds, positions, 10)
    assert len(set(noise.flatten().tolist())) == 90
    for batch, seed in enumerate(seeds.tolist()):
        for row, position in enumerate(positions[batch].tolist()):
            exact = torch.tensor([slow_noise(seed, position, token) for token in range(10)])
            assert torch.allclose(noise[batch, row], exact, rtol=1e-6)
    assert torch.equal(reference.gumbel_noise(seeds[1:], positions[1:, 2:], 7), noise[1:, 2:, :7])


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(7, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.03), (40, 0.9, 0.0), (60, 0.95, 0.01)]
)
def test_filters_are_those_of_transformers(implementation, top_k, top_p, min_p):
    """With sharpness 0 the choice is the largest noise among the kept tokens: 300 seeds show the kept set."""
    select = implementation.select_tokens
    g = torch.Generator().manual_seed(top_k)
    for scale in (0.5, 2.0, 6.0):
        scores = torch.randn(1, 257, generator=g) * scale
        kept = scores / 0.7
        if top_k:
            kept = TopKLogitsWarper(top_k)(None, kept)
        if top_p < 1:
            kept = TopPLogitsWarper(top_p)(None, kept)
        if min_p:
            kept = MinPLogitsWarper(min_p)(None, kept)
        positions = torch.arange(300)[None]
        noise = reference.gumbel_noise(torch.tensor([11]), positions, 257)
        expected = noise.masked_fill(torch.isinf(kept), -math.inf).argmax(-1)
        settings = parameters(1, 11, 0.7, top_k, top_p, min_p, sharpness=0.0)
        assert torch.equal(select(scores[:, None].expand(1, 300, 257), positions, *settings), expected)


def test_tokens_equal_to_a_threshold_are_kept(implementation):
    select = implementation.select_tokens
    logits = torch.tensor([3.0, 1.0, 2.0, 2.0, 0.0, 2.0, 1.0]).expand(1, 400, 7)
    positions = torch.arange(400)[None]
    for settings, kept in (
        ({"top_k": 2}, {0, 2, 3, 5}),
        ({"top_k": 4}, {0, 2, 3, 5}),
        ({"top_k": 5}, {0, 1, 2, 3, 5, 6}),
        ({"top_p": 0.5}, {0, 2, 3, 5}),  # e^3 weighs 0.41
        ({"top_p": 0.4}, {0}),
        ({"min_p": 0.36}, {0, 2, 3, 5}),  # e^-1 = 0.368
        ({"min_p": 0.37}, {0}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 4, "top_p": 0.47}, {0}),  # of the survivors of top-k, e^3 weighs 0.475
        ({"top_k": 4, "top_p": 0.48}, {0, 2, 3, 5}),
    ):
        ids = select(logits, positions, *parameters(1, 2, sharpness=0.0, **settings))
        assert set(ids.flatten().tolist()) == kept, settings


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"sharpness": math.inf}, {"top_k": 1}, {"top_p": 1e-7}])
def test_greedy_is_argmax(implementation, settings, dtype):
    select = implementation.select_tokens
    logits = torch.randn(3, 16, 1023, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[:, :, 700] = logits[:, :, 300] = 6.0  # the first of them wins, unless the filters leave the tie to noise
    logits[1, :, 200:400] = -math.inf
    positions = torch.arange(48).view(3, 16)
    ids = select(logits, positions, *parameters(3, 1, **settings))
    if {"temperature", "sharpness"} & settings.keys():
        assert ids[[0, 2]].eq(300).all()
        assert ids[1].eq(700).all()
    else:
        assert set(ids[[0, 2]].flatten().tolist()) == {300, 700}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_infinities_and_nan(implementation, temperature):
    select = implementation.select_tokens
    logits = torch.zeros(6, 1, 200)
    logits[0] = -math.inf
    logits[1, 0, [70, 150]] = math.inf
    logits[2, 0, 199] = math.nan
    logits[3, 0, 0] = math.nan
    logits[3, 0, 9] = math.inf
    logits[4] = -math.inf
    logits[4, 0, 130] = -5.0
    logits[5, 0, :199] = -math.inf
    for settings in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"sharpness": 0.0}, {"sharpness": 3.0}):
        ids = select(logits, torch.zeros(6, 1, dtype=torch.int64), *parameters(6, 3, temperature, **settings))
        assert ids[:, 0].tolist() == [0, 70, -1, -1, 130, 199], settings


def chi_squared(pairs, expected):
    """p-value of the counts of ``pairs`` (a code per draw) against probabilities."""
    counts = torch.bincount(pairs, minlength=expected.numel()).double()
    live = expected > 0
    assert counts[~live].sum() == 0
    wanted = expected[live] * counts.sum()
    return scipy.stats.chi2.sf(float(((counts[live] - wanted) ** 2 / wanted).sum()), int(live.sum()) - 1)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 4}, {"temperature": 1.5, "top_p": 0.8}])
def test_two_positions_follow_the_exact_softmax_jointly(settings):
    vocab, draws = 5, 10**6
    g = torch.Generator().manual_seed(2)
    first = torch.randn(vocab, generator=g) * 1.5
    second = torch.randn(vocab, vocab, generator=g) * 1.5  # depends on the first token
    seeds = torch.arange(draws) * 7919 - 10**9

    def exact(logits):
        z = logits.double() / settings.get("temperature", 1.0)
        if "top_k" in settings:
            z = z.masked_fill(z < z.topk(settings["top_k"]).values[..., -1:], -math.inf)
        p = z.softmax(-1)
        above = torch.stack([torch.where(p > p[..., i : i + 1], p, 0).sum(-1) for i in range(vocab)], -1)
        return z.masked_fill(above >= settings.get("top_p", 1.0), -math.inf).softmax(-1)

    def draw(logits, position):
        ids = ops.select_tokens(
            logits.expand(draws, 1, vocab), torch.full((draws, 1), position), *parameters(draws, seeds, **settings)
        )
        return ids[:, 0]

    joint = (exact(first)[:, None] * exact(second)).flatten()
    x = draw(first, 100)
    right = x * vocab + draw(second[x][:, None], 101)
    reused = x * vocab + draw(second[x][:, None], 100)  # wrong: both positions see the same noise
    assert chi_squared(right, joint) > 1e-3
    assert chi_squared(reused, joint) < 1e-12


def test_a_filtered_token_is_not_chosen_where_all_scores_are_too_low_for_a_float(implementation):
    settings = parameters(1, 0, temperature=1e-30, min_p=0.5, sharpness=3e38)
    logits = torch.tensor([[[-3.0, -1.0, -2.0]]])
    assert implementation.select_tokens(logits, torch.tensor([[0]]), *settings).item() == 1


@pytest.mark.parametrize("rows", [1, 5])
def test_rows_may_follow_one_position(rows, implementation):
    logits, _, *rest = draw_case(0, 300, rows=rows)
    before = torch.tensor([0, 7, 2**32 - 2, *INT64, -3] * 2)
    positions = before[:, None] + torch.arange(1, rows + 1)
    ids = implementation.select_tokens(logits, before, *rest)
    assert torch.equal(ids, reference.select_tokens(logits, positions, *rest))
    assert rows == 1 or not torch.equal(ids, reference.select_tokens(logits, before[:, None].expand(-1, rows), *rest))


@pytest.mark.cuda
def test_twin_gives_the_same_bits_on_cuda():
    for seed in range(12):
        case = draw_case(seed, 1000)
        there = [x.cuda() for x in case]
        assert torch.equal(reference.select_tokens(*there).cpu(), reference.select_tokens(*case)), seed
        noise = reference.gumbel_noise(case[2].cuda(), case[1].cuda(), 1000).cpu()
        assert torch.equal(noise, reference.gumbel_noise(case[2], case[1], 1000))
