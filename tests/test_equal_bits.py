"""Targets in 8 bits have the same bits with every instruction set, number of threads, width and chunk of a prompt."""

import pytest
from equal_bits import ARM_SETS, differing, run_all

from dflash import _C

pytestmark = pytest.mark.linux  # forks


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def lines(request):
    return run_all(request.param, new=5)


def test_text_and_log_probabilities_have_the_same_bits_everywhere(lines):
    assert sorted({line["isa"] for line in lines}) == sorted([*_C.isas(), *ARM_SETS])
    assert differing(lines) == []


def test_a_receipt_of_one_instruction_set_verifies_exactly_on_the_others(lines):
    assert all(line["is_exact"] for line in lines if line["isa"] != _C.isas()[0])
