"""Test acceptance="rejection": the tokens have the target's exact joint distribution."""

import itertools

import pytest
import scipy.stats
import torch
from baseline import prompt
from examples import is_long
from families import make_draft, make_target

import dflash
from dflash import ops
from dflash.ops import reference
from dflash.sampling import Sampling, SamplingArguments, fold
from dflash.sampling import acceptance as rejection

DRAWS = 1_000_000 if is_long() else 300_000
CHUNK = 25_000
VOCAB = 4
SETTINGS = [{}, {"temperature": 0.6, "top_k": 3}, {"temperature": 1.4, "top_p": 0.85, "min_p": 0.02}]


def parameters(batch: int, temperature: float = 1.0, **filters) -> Sampling:
    sampling = Sampling.create(batch)
    sampling.set_(slice(batch), SamplingArguments(temperature=temperature, seed=0, **filters))
    sampling.seeds.copy_(torch.arange(batch) * 7919 - 12345)
    return sampling


def case(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of a target and of a drafter.

    The target's ``[VOCAB + 1, VOCAB]`` are indexed by the previous token; the last row is for the anchor. The drafter's
    ``[2, VOCAB]`` are for the two positions after an anchor.
    """
    g = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB + 1, VOCAB, generator=g) * 1.5, torch.randn(2, VOCAB, generator=g) * 1.5


def exact(target: torch.Tensor, **settings) -> torch.Tensor:
    """Return the joint distribution of two tokens after the anchor, ``[VOCAB, VOCAB]`` float64, filtered by hand."""
    logits = target.double() / settings.get("temperature", 1.0)
    p = logits.softmax(-1)
    if k := settings.get("top_k"):
        p = torch.where(p >= p.sort(-1, descending=True).values[:, k - 1 : k], p, 0.0)
        p = p / p.sum(-1, keepdim=True)
    if (mass := settings.get("top_p", 1.0)) < 1:
        above = torch.stack([torch.where(p > p[:, i : i + 1], p, 0.0).sum(-1) for i in range(VOCAB)], -1)
        p = torch.where(above < mass, p, 0.0)
    p = torch.where(p >= settings.get("min_p", 0.0) * p.amax(-1, keepdim=True), p, 0.0)
    p = p / p.sum(-1, keepdim=True)
    return p[VOCAB][:, None] * p[:VOCAB]


def emit(target: torch.Tensor, propose, draws: int = DRAWS, **settings) -> torch.Tensor:
    """Return the two tokens after an anchor, ``[draws, 2]``, as a step with two drafts emits them.

    If the step emits only one, the second comes from the target itself, with other noise.
    """
    generator = torch.Generator().manual_seed(0)
    second = exact(target, **settings)
    second = second / second.sum(1, keepdim=True).clamp(min=1e-300)
    tokens = []
    for start in range(0, draws, CHUNK):
        sampling = parameters(CHUNK, **settings)
        sampling.seeds.add_(start)
        positions = torch.tensor([[11, 12, 13]]).expand(CHUNK, -1)
        drafts, q = propose(sampling, positions[:, :2])
        anchor = torch.full((CHUNK, 1), VOCAB)
        p = rejection.probabilities(target[torch.cat([anchor, drafts], 1)], sampling)
        posterior = rejection.verify(drafts, q, p, positions, sampling.seeds)
        block, state = torch.cat([anchor, drafts], 1), [torch.full((CHUNK,), fill) for fill in (99, 10, 0, 0)]
        emitted = torch.zeros(CHUNK, 16, dtype=torch.int64)
        ops.accept_prefix_(block, posterior, emitted.new_empty(CHUNK, 0), state[0], emitted, *state[1:])
        own = torch.multinomial(second.clamp(min=1e-300), CHUNK, replacement=True, generator=generator)
        own = own.gather(0, emitted[None, :, 11])[0]
        tokens.append(torch.stack([emitted[:, 11], torch.where(state[2] == 1, own, emitted[:, 12])], 1))
    return torch.cat(tokens)


def once(logits: torch.Tensor):
    """Return a function that draws drafts in one pass, as the step does."""

    def propose(sampling: Sampling, positions: torch.Tensor):
        q = rejection.probabilities(logits.expand(len(positions), -1, -1), sampling)
        return rejection.propose(q, positions, sampling.seeds), q

    return propose


def distance(tokens: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    """Return the p-value of a chi-squared test of the joint counts, and the total variation."""
    counts = torch.bincount(tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB**2).double()
    wanted = wanted.flatten()
    assert counts[wanted == 0].sum() == 0, "a token that a filter drops was chosen"
    live = wanted > 0
    p_value = scipy.stats.chisquare(counts[live], wanted[live] * len(tokens)).pvalue
    return p_value, float((counts / len(tokens) - wanted).abs().sum() / 2)


@pytest.mark.long
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_joint_distribution_of_two_positions_is_the_targets(settings):
    target, draft = case(0)
    tokens = emit(target, once(draft), **settings)
    p_value, variation = distance(tokens, exact(target, **settings))
    assert p_value > 1e-3, variation


class TestAccept:
    def test_a_drafter_equal_to_the_target_is_always_accepted(self):
        sampling = parameters(500)
        p = rejection.probabilities(torch.randn(500, 4, 7, generator=torch.Generator().manual_seed(1)), sampling)
        positions = torch.arange(4).expand(500, -1)
        drafts = rejection.propose(p[:, :3], positions[:, :3], sampling.seeds)
        posterior = rejection.verify(drafts, p[:, :3], p, positions, sampling.seeds)
        assert torch.equal(posterior[:, :3], drafts)

    def test_the_share_accepted_is_one_minus_the_total_variation(self):
        draws = 200_000
        target, draft = case(3)
        sampling = parameters(draws)
        p = target[:2].softmax(-1).expand(draws, -1, -1)
        q = draft[:1].softmax(-1).expand(draws, -1, -1)
        positions = torch.tensor([[5, 6]]).expand(draws, -1)
        drafts = rejection.propose(q, positions[:, :1], sampling.seeds)
        posterior = rejection.verify(drafts, q, p, positions, sampling.seeds)
        share = (posterior[:, :1] == drafts).double().mean()
        wanted = torch.minimum(p[0, 0], q[0, 0]).double().sum()
        assert abs(share - wanted) < 5 * (wanted * (1 - wanted) / draws).sqrt()

    def test_disjoint_supports_reject_everything(self):
        sampling = parameters(50)
        p, q = torch.tensor([0.5, 0.5, 0, 0]).expand(50, 3, -1), torch.tensor([0, 0, 0.5, 0.5]).expand(50, 2, -1)
        positions = torch.arange(3).expand(50, -1)
        drafts = rejection.propose(q, positions[:, :2], sampling.seeds)
        assert (drafts >= 2).all()
        assert (rejection.verify(drafts, q, p, positions, sampling.seeds) < 2).all()

    def test_nan_in_the_drafter_proposes_nothing_and_in_the_target_is_marked(self):
        sampling = parameters(40)
        logits = torch.randn(40, 3, 6, generator=torch.Generator().manual_seed(2))
        broken = logits[:, :2].clone()
        broken[:, 0, 4] = torch.nan
        q, p = rejection.probabilities(broken, sampling), rejection.probabilities(logits, sampling)
        positions = torch.arange(3).expand(40, -1)
        drafts = rejection.propose(q, positions[:, :2], sampling.seeds)
        assert (drafts[:, 0] == -1).all()
        posterior = rejection.verify(drafts, q, p, positions, sampling.seeds)
        assert (posterior >= 0).all()
        assert len(posterior[:, 0].unique()) > 3
        logits[:, 1, 0] = torch.nan
        p = rejection.probabilities(logits, sampling)
        assert rejection.verify(drafts, q, p, positions, sampling.seeds).eq(-1).all(0).tolist() == [False, True, False]


def test_probabilities_are_those_of_select_tokens():
    g = torch.Generator().manual_seed(4)
    logits = torch.randn(1, 1, 9, generator=g) * 2
    logits[..., 3] = -torch.inf
    draws = 100_000
    for settings in ({}, {"temperature": 0.5, "top_k": 6}, {"temperature": 2.0, "top_p": 0.9, "min_p": 0.05}):
        s = parameters(draws, **settings)
        rows = logits.expand(draws, -1, -1).contiguous()
        zeros = torch.zeros(draws, 1, dtype=torch.int64)
        ids = ops.select_tokens(rows, zeros, s.seeds, s.temperature, s.top_k, s.top_p, s.min_p, s.sharpness)
        p = rejection.probabilities(rows[:1], parameters(1, **settings))[0, 0].double()
        counts = torch.bincount(ids[:, 0], minlength=9)
        assert counts[p == 0].sum() == 0
        assert scipy.stats.chisquare(counts[p > 0], p[p > 0] / p.sum() * draws).pvalue > 1e-3


def test_infinite_logits_choose_as_select_tokens_does():
    inf = torch.inf
    logits = torch.tensor([[[1.0, inf, 2.0, inf]], [[-inf, -inf, -inf, -inf]], [[1e38, 0.0, -inf, 3e38]]])
    s = parameters(3, temperature=0.1)
    p = rejection.probabilities(logits, s)
    ids = ops.select_tokens(
        logits, torch.zeros(3, 1).long(), s.seeds, s.temperature, s.top_k, s.top_p, s.min_p, s.sharpness
    )
    assert torch.equal(p[:, 0], torch.nn.functional.one_hot(ids[:, 0], 4).float())


def test_streams_are_independent():
    """The streams differ in every word, and stream 0 is the noise that `select_tokens` uses."""
    seeds, positions = torch.arange(50), torch.arange(20).expand(50, -1)
    noise = torch.stack([reference.gumbel_noise(seeds, positions, 64, stream) for stream in range(4)])
    assert torch.equal(noise[0], reference.gumbel_noise(seeds, positions, 64))
    assert noise.flatten(1).double().corrcoef().fill_diagonal_(0).abs().max() < 0.02
    uniform = reference.uniform_noise(seeds, positions, 2)
    assert scipy.stats.kstest(uniform.flatten(), "uniform").pvalue > 1e-3
    assert torch.equal((-(-torch.log1p(-uniform)).log()).float().round(decimals=4), noise[2, ..., 0].round(decimals=4))


class TestGenerate:
    @pytest.mark.parametrize("variant", ["Qwen3-4B", "DFlash2"])
    def test_the_tokens_of_the_generator_follow_the_target(self, variant):
        """The two tokens after the first new one are compared with one-token probabilities of the same target."""
        target = make_target("qwen3", vocab_size=8, num_hidden_layers=2)
        rows, rounds, p = 500, 16, prompt(4, vocab=8)
        generator = dflash.Generator(target, make_draft(target, variant), max_length=16, batch_size=rows, block_size=4)
        tokens, lengths = [], set()
        for index in range(rounds):
            seeds = [fold(index, row) for row in range(rows)]
            output = generator.generate(
                p[None].expand(rows, -1), max_new_tokens=3, temperature=0.9, seed=seeds, acceptance="rejection",
                return_dict_in_generate=True,
            )  # fmt: skip
            tokens.append(output.sequences[:, 4:])
            lengths.update(n for row in output.statistics.acceptance_lengths for n in row)
        assert lengths == {1, 2}
        triples = torch.tensor(list(itertools.product(range(8), repeat=3)))
        with torch.no_grad():
            logits = target(torch.cat([p.expand(512, -1), triples], 1)).logits[:, 3:6].double() / 0.9
        wanted = logits.softmax(-1).gather(-1, triples[..., None]).prod(1)[:, 0]
        counts = torch.bincount((torch.cat(tokens) * torch.tensor([64, 8, 1])).sum(1), minlength=512).double()
        often = wanted * rows * rounds >= 5  # all rare pairs form one class
        counts = torch.cat([counts[often], counts[~often].sum()[None]])
        wanted = torch.cat([wanted[often], wanted[~often].sum()[None]]) * rows * rounds
        assert scipy.stats.chisquare(counts, wanted).pvalue > 1e-3

    def test_at_temperature_0_it_is_the_greedy_text(self, target, draft):
        ids = prompt(5)[None]
        greedy = dflash.generate(target, draft, ids, max_new_tokens=12)
        assert torch.equal(dflash.generate(target, draft, ids, max_new_tokens=12, acceptance="rejection"), greedy)

    def test_equal_calls_are_equal_and_rows_never_meet(self, target, draft):
        ids = prompt(5)[None].expand(3, -1)
        call = {"max_new_tokens": 20, "temperature": 1.0, "acceptance": "rejection"}
        batch = dflash.generate(target, draft, ids, seed=4, **call)
        assert torch.equal(dflash.generate(target, draft, ids, seed=4, **call), batch)
        for row in range(3):
            assert torch.equal(dflash.generate(target, draft, ids[:1], seed=fold(4, row), **call)[0], batch[row])

    def test_bans_hold(self, target, draft):
        call = {"max_new_tokens": 30, "temperature": 1.5, "seed": 3, "acceptance": "rejection"}
        banned = list(range(40))
        output = dflash.generate(target, draft, prompt(5)[None], suppress_tokens=banned, **call)
        assert not torch.isin(output[0, 5:], torch.tensor(banned)).any()
