import math

import pytest
import torch

from dflash.sampling import Sampling, SamplingArguments, fold
from dflash.settings import checked


def test_fold_gives_every_row_its_own_seed():
    for seed in (0, 1, -1, 2**63 - 1, -(2**63)):
        assert fold(seed, 0) == seed
        folded = [fold(seed, row) for row in range(1, 500)]
        assert len({seed, *folded}) == 500
        assert all(-(2**63) <= x < 2**63 for x in folded)
        assert min(folded) < 0 < max(folded)
    assert fold(1, 1) == -8730512010378760701  # part of the contract: a seed keeps its text
    assert fold(-5, 1) == 1386767115406242767
    # neighboring seeds and rows do not collide
    assert len({fold(seed, row) for seed in range(50) for row in range(50)}) == 2500


def test_values_land_in_their_rows_and_addresses_stay():
    sampling = Sampling.create(3)
    addresses = [x.data_ptr() for x in vars(sampling).values()]
    sampling.set_(
        slice(3), SamplingArguments(temperature=0.5, top_k=20, top_p=0.9, min_p=0.25, seed=7, draft_sharpness=math.inf)
    )
    assert sampling.seeds.tolist() == [7, fold(7, 1), fold(7, 2)]
    assert sampling.temperature.tolist() == [0.5] * 3
    assert sampling.top_k.tolist() == [20] * 3
    assert torch.equal(sampling.top_p, torch.full((3,), 0.9))
    assert sampling.min_p.tolist() == [0.25] * 3
    assert sampling.sharpness.tolist() == [math.inf] * 3
    sampling.set_(slice(2), SamplingArguments(seed=[-1, 4]))
    assert sampling.seeds.tolist() == [-1, 4, fold(7, 2)]
    assert sampling.temperature.tolist() == [0.0, 0.0, 0.5]
    assert torch.equal(sampling.top_p, torch.tensor([1.0, 1.0, 0.9]))
    assert sampling.top_k.tolist() == [0, 0, 20]
    assert sampling.min_p.tolist() == [0.0, 0.0, 0.25]
    assert [x.data_ptr() for x in vars(sampling).values()] == addresses
    assert [x.dtype for x in vars(sampling).values()] == [
        torch.int64, torch.float32, torch.int64, torch.float32, torch.float32, torch.float32, torch.float32,
    ]  # fmt: skip


def test_seed_none_draws_from_the_default_generator():
    sampling = Sampling.create(2)
    torch.manual_seed(3)
    sampling.set_(slice(2), SamplingArguments(temperature=1.0))
    first = sampling.seeds.tolist()
    sampling.set_(slice(2), SamplingArguments(temperature=1.0))
    assert sampling.seeds.tolist() != first
    torch.manual_seed(3)
    sampling.set_(slice(2), SamplingArguments(temperature=1.0))
    assert sampling.seeds.tolist() == first == [first[0], fold(first[0], 1)]


def test_integers_and_extreme_numbers_are_accepted():
    sampling = Sampling.create(2)
    sampling.set_(
        slice(2), SamplingArguments(temperature=1, top_p=1, min_p=0, top_k=10**30, draft_sharpness=1e300, seed=(3, 4))
    )
    assert sampling.seeds.tolist() == [3, 4]
    assert sampling.top_k.tolist() == [2**63 - 1] * 2
    assert sampling.sharpness.tolist() == [float("inf")] * 2  # past fp32: the plain argmax
    sampling.set_(slice(2), SamplingArguments(temperature=1e-35))
    assert sampling.temperature.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("name", "value", "error", "message"), [
    ("temperature", -0.1, ValueError, r"temperature must be a finite number of at least 0, got -0.1"),
    ("temperature", math.nan, ValueError, r"temperature must be a finite .*got nan"),
    ("temperature", "1", TypeError, r"temperature must be a finite .*got '1'"),
    ("top_k", -1, ValueError, r"top_k must be an integer of at least 0, got -1"),
    ("top_k", 2.0, TypeError, r"top_k must be an integer .*got 2.0"),
    ("top_p", 1.01, ValueError, r"top_p must lie in \(0, 1\] .*got 1.01"),
    ("top_p", [0.5], TypeError, r"top_p must lie in \(0, 1\] .*got \[0.5\]"),
    ("min_p", -0.01, ValueError, r"min_p must lie in \[0, 1\] .*got -0.01"),
    ("min_p", math.nan, ValueError, r"min_p must lie in .*got nan"),
    ("draft_sharpness", -1.0, ValueError, r"draft_sharpness must be a number of at least 0 .*got -1.0"),
    ("draft_sharpness", "auto", TypeError, r"draft_sharpness must be a number .* got 'auto'"),
    ("repetition_penalty", 0, ValueError, r"repetition_penalty must be a finite number of more than 0 .*, got 0"),
    ("presence_penalty", math.inf, ValueError, r"presence_penalty must lie in -1e30 .. 1e30, got inf"),
    ("frequency_penalty", [1.0], TypeError, r"frequency_penalty must lie in .* got \[1.0\]"),
    ("no_repeat_ngram_size", -1, ValueError, r"no_repeat_ngram_size must be an integer of at least 0, got -1"),
    ("logit_bias", [(1, 2.0)], TypeError, r"logit_bias must map token ids to numbers, got"),
    ("logit_bias", {97: 1.0}, ValueError, r"logit_bias must hold token ids in 0 \.\. 96, got 97"),
    ("logit_bias", {"5": 1.0}, TypeError, r"logit_bias must hold token ids in 0 \.\. 96, got '5'"),
    ("repetition_penalty", 1e-60, ValueError, r"repetition_penalty must be .* a normal one in float32, got 1e-60"),
    ("logit_bias", {(5, 6): -3.402823466385289e38}, ValueError, r"logit_bias of tokens \[5, 6\] must be .* in float32"),
    ("logit_bias", {(5, 6): math.nan}, ValueError, r"logit_bias of tokens \[5, 6\] must be a finite number"),
    ("logit_bias", {(5, 97): 1.0}, ValueError, r"logit_bias must hold token ids in 0 \.\. 96, got 97"),
    ("logit_bias", {(): 1.0}, ValueError, r"logit_bias must not hold an empty tuple"),
    ("bad_words_ids", "bad", TypeError, r"bad_words_ids must be a list of lists of token ids, got 'bad'"),
    ("bad_words_ids", [[]], ValueError, r"bad_words_ids must not hold an empty list"),
    ("bad_words_ids", [[3, 97]], ValueError, r"bad_words_ids must hold token ids in 0 \.\. 96, got 97"),
    ("suppress_tokens", 5, TypeError, r"suppress_tokens must be a list of token ids, got 5"),
    ("forced_bos_token_id", [1, 2], ValueError, r"forced_bos_token_id must be one token id, got \[1, 2\]"),
    ("forced_eos_token_id", -3, ValueError, r"forced_eos_token_id must hold token ids in 0 \.\. 96, got -3"),
    ("logits_processor", print, TypeError, r"logits_processor must be a list of callables, got builtin"),
    ("logits_processor", [3], TypeError, r"logits_processor must be a list of callables, got 3 in it"),
    ("acceptance", "greedy", ValueError, r'acceptance must be "keyed" or "rejection", got \'greedy\''),
    ("tree", True, TypeError, r'tree must be a number of rows in 2 \.\. 128, "auto" or None, got True'),
    ("seed", 2**63, ValueError, r"seed must fit in int64, got 9223372036854775808"),
    ("seed", [0, -(2**63) - 1], ValueError, r"seed\[1\] must fit in int64, got -9223372036854775809"),
    ("seed", [1, 2.0], TypeError, r"seed\[1\] must be an integer, got 2.0"),
    ("seed", 1.5, TypeError, r"seed must be an integer, a sequence with one per row, or None, got 1.5"),
    ("seed", True, TypeError, r"seed must be an integer, .*got True"),
    ("seed", "12", TypeError, r"seed must be an integer, .*got '12'"),
])  # fmt: skip
def test_wrong_values_are_named(name, value, error, message):
    with pytest.raises(error, match=message):
        checked(name, value, vocab_size=97)


def test_seeds_are_one_per_row():
    with pytest.raises(ValueError, match=r"seed must be an integer or one per row, 2 in all, got 3"):
        SamplingArguments(seed=(1, 2, 3)).seeds(2)
    assert checked("seed", torch.tensor([3, 4])) == (3, 4)
