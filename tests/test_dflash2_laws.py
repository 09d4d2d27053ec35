"""Test that tokens follow the target's distribution after rejection of a DFlash 2 drafter's paths."""

import itertools

import pytest
import scipy.stats
import torch
from baseline import prompt
from draft_variants import random_drafter
from families import draft_config, make_target

import dflash
from dflash.sampling import fold

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
