"""Residency against tables made by hand from NVIDIA's limits for compute capability 9.0, and its rule."""

import pytest
from cubins import Resources
from launches import Launch
from residency import findings, need, neighbors, room

LINEAR = need(56, 256, 92160 + 1152)  # 14336 registers, 93312 bytes: two per multiprocessor


def test_a_warp_gets_registers_in_portions():
    assert vars(need(78, 512, 1152)) == {"registers": 16 * 2560, "threads": 512, "shared": 1152, "blocks": 1}


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "blocks"),
    [
        # 256 blocks: two on 124 multiprocessors, one on 8
        (78, 512, 1152, 8),  # 40960 registers: not next to two, once next to one
        (36, 512, 1152, 124 + 8 * 2),  # 20480: once next to two, twice next to one
        (16, 1024, 1024, 132),  # threads: 512 or 256 are taken of 2048
        (56, 256, 92160 + 1152, 8),  # another of its kind
    ],
)
def test_what_fits_next_to_a_product(registers, threads, shared, blocks):
    assert room(LINEAR, 256, need(registers, threads, shared)) == blocks


def test_fewer_stages_make_room_for_a_block_of_the_next_product_everywhere():
    smaller = need(56, 256, 73728 + 1152)
    assert room(smaller, 256, smaller) == 124 + 8 * 2


def test_a_grid_of_several_waves_fills_every_multiprocessor():
    assert room(LINEAR, 1187, need(32, 128, 1024)) == 132 * 9  # 36864 registers left, 4096 each
    assert room(LINEAR, 1187, LINEAR) == 0


def pair_of(following, registers):
    """The neighbors of a product of 240 blocks, two on 108 multiprocessors and one on 24, and another kernel."""
    product = Launch("product<16>", 240, 256, 73728, True)
    resources = {"product<16>": Resources(56, 1152), following.kernel: Resources(registers, 1152)}
    return neighbors([product, following], resources)


def norm(overlaps=True):
    return Launch("norm<8>", 16, 512, 0, overlaps)


SAME = ("product", "product")


def test_room_for_every_block_is_fine():
    (pair,) = pair_of(norm(), registers=36)
    assert (pair.fit, pair.places) == (16, 16)
    assert findings([pair], {}) == []


def test_a_kernel_that_takes_too_many_registers_is_found():
    assert findings(pair_of(norm(), registers=100), {}) == ["room for 0 of 16 blocks: product -> norm"]


def test_a_launch_that_does_not_overlap_needs_no_room():
    assert pair_of(norm(overlaps=False), registers=100) == []


@pytest.mark.parametrize(("least", "found"), [(65, []), (66, ["room for 156 of 240 blocks: product -> product"])])
def test_an_exception_says_how_much_must_fit(least, found):
    pairs = pair_of(Launch("product<16>", 240, 256, 73728, True), registers=56)
    assert findings(pairs, {SAME: (least, "a reason")}) == found


def test_an_exception_that_nothing_needs_is_found():
    assert findings(pair_of(norm(), registers=36), {SAME: (65, "")}) == ["no exception is needed: product -> product"]
