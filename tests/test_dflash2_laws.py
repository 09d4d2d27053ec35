"""Test what DFlash 2 drafts are drawn from: the selector's law, and the target's after rejection."""

import functools
import itertools

import pytest
import scipy.stats
import torch
from baseline import prompt
from draft_variants import random_drafter
from families import draft_config, make_target

import dflash
from dflash.drafter import PairWeights
from dflash.proposers import LinkedPredictions
from dflash.sampling import RejectionAcceptance, Sampling, SamplingArguments, fold

# ---------------------------------------------------------------------------------------------- the selector's law

SMALL, SLOTS, CANDIDATES, ANCHOR, DRAWS = 6, 3, 3, 4, 40_000


def one_block() -> tuple[torch.Tensor, PairWeights]:
    """Return the logits of a block's positions, and what scores pairs of its tokens."""
    generator = torch.Generator().manual_seed(5)
    logits = 1.5 * torch.randn(SLOTS, SMALL, generator=generator)
    codes = torch.randn(2, SMALL, 2, generator=generator)
    return logits, PairWeights(codes[0], torch.randn(1, SLOTS, 2, generator=generator), codes[1])


def law(temperature: float) -> dict[tuple[int, ...], float]:
    """Return the probability of every path through the best candidates of each position, computed by hand."""
    logits, pairs = one_block()
    candidates, paths = logits.topk(CANDIDATES, -1).indices.tolist(), {(): 1.0}
    for slot, among in enumerate(candidates):
        grown = {}
        for path, probability in paths.items():
            before = pairs.predecessors[path[-1] if path else ANCHOR] * pairs.queries[0, slot]
            scores = logits[slot, among] + pairs.successors[among] @ before
            for token, share in zip(among, (scores.double() / temperature).softmax(-1).tolist(), strict=True):
                grown[(*path, token)] = probability * share
        paths = grown
    return paths


EVERY = list(itertools.product(range(SMALL), repeat=SLOTS))


@functools.cache
def drawn(way: str, temperature: float) -> torch.Tensor:
    """Return how often each path of `EVERY` was drawn from one block, in `DRAWS` rows.

    Args:
        way: ``"keyed"`` as for keyed acceptance at sharpness 1, ``"rejection"`` as for rejection, ``"plain"`` by the
            noise of keyed acceptance among the candidates of rejection.
        temperature: of every row.
    """
    logits, pairs = one_block()
    s = Sampling.create(DRAWS)
    s.set_(slice(DRAWS), SamplingArguments(temperature, seed=0))
    positions = torch.arange(9, 9 + SLOTS).expand(DRAWS, -1)
    many = pairs._replace(queries=pairs.queries.expand(DRAWS, -1, -1))
    predictions = LinkedPredictions(logits.expand(DRAWS, -1, -1), many, torch.full((DRAWS,), ANCHOR), CANDIDATES)
    acceptance = RejectionAcceptance(DRAWS, SLOTS, SMALL)
    if way == "plain":
        acceptance.STREAM = 0
    paths = predictions.draw(positions, s) if way == "keyed" else predictions.draw_for(acceptance, positions, s)
    return torch.bincount(paths @ SMALL ** torch.arange(SLOTS - 1, -1, -1), minlength=len(EVERY)).double()


def wanted_paths(temperature: float) -> torch.Tensor:
    probabilities = law(temperature)
    return torch.tensor([probabilities.get(path, 0.0) for path in EVERY], dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("way", ["rejection", "plain"])
def test_paths_through_plain_candidates_have_the_selectors_law(way, temperature):
    counts, wanted = drawn(way, temperature), wanted_paths(temperature)
    assert counts[wanted == 0].sum() == 0
    live = wanted > 0
    assert scipy.stats.chisquare(counts[live], wanted[live] / wanted.sum() * DRAWS).pvalue > 1e-3


# ---------------------------------------------------------------------------------------------- rejection

TOKENS, ROWS = 8, 1000
FIRST = 5  # every row's first new token, which no drafter writes


@pytest.fixture(scope="module")
def pair():
    """Return a target with 8 tokens and a drafter with 3 candidates, of whose drafts about a fifth are accepted."""
    target = make_target("qwen3", seed=1, vocab_size=TOKENS, num_hidden_layers=1)
    config = draft_config(target, "DFlash2")
    config["dflash_config"]["selector_top_k"] = 3
    draft = random_drafter(config)
    draft.candidate_selector.successor_codebook.mul_(0.5)
    return target, draft


@pytest.fixture(scope="module")
def wanted(pair):
    """Return the probability of every pair of tokens after the first new one, by passes of the target itself."""
    target, _ = pair
    pairs = torch.tensor([[FIRST, *rest] for rest in itertools.product(range(TOKENS), repeat=2)])
    with torch.no_grad():
        logits = target(torch.cat([prompt(4, vocab=TOKENS).expand(len(pairs), -1), pairs], 1)).logits[:, 4:6]
    return (logits.double() / 0.9).softmax(-1).gather(-1, pairs[:, 1:, None]).prod(1)[:, 0]


def emitted(pair, rounds: int) -> torch.Tensor:
    """Return how often each pair of tokens followed the first new one, in ``rounds`` batches."""
    target, draft = pair
    generator = dflash.Generator(target, draft, max_length=16, batch_size=ROWS, block_size=3)
    counts = torch.zeros(TOKENS**2, dtype=torch.float64)
    for index in range(rounds):
        ids = generator.generate(
            prompt(4, vocab=TOKENS)[None].expand(ROWS, -1), max_new_tokens=3, temperature=0.9, acceptance="rejection",
            seed=[fold(index, row) for row in range(ROWS)],
            begin_suppress_tokens=[token for token in range(TOKENS) if token != FIRST],
        )  # fmt: skip
        assert ids[:, 4].eq(FIRST).all()
        counts += torch.bincount(ids[:, 5] * TOKENS + ids[:, 6], minlength=TOKENS**2)
    return counts


def p_value(counts: torch.Tensor, wanted: torch.Tensor) -> float:
    wanted = wanted * counts.sum()
    often = wanted >= 5  # all rare pairs form one class
    counts = torch.cat([counts[often], counts[~often].sum()[None]])
    wanted = torch.cat([wanted[often], wanted[~often].sum()[None]])
    return float(scipy.stats.chisquare(counts, wanted * (counts.sum() / wanted.sum())).pvalue)


def test_tokens_of_steps_with_rejection_follow_the_target(pair, wanted):
    assert p_value(emitted(pair, 8), wanted) > 1e-3
