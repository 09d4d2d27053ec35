"""The arithmetic of residency, against tables made by hand from NVIDIA's limits for compute capability 9.0."""

import pytest
from residency import need, room

LINEAR = need(56, 256, 92160 + 128)  # 14336 registers, 93312 bytes: two per multiprocessor


def test_a_block_costs_registers_by_the_warp_and_shared_memory_of_its_own():
    assert vars(need(78, 512, 128)) == {"registers": 16 * 2560, "threads": 512, "shared": 1152, "blocks": 1}


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "blocks"),
    [
        # 256 blocks: two on 124 multiprocessors, one on 8
        (78, 512, 128, 8),  # 40960 registers: not next to two, once next to one
        (36, 512, 128, 124 + 8 * 2),  # 20480: once next to two, twice next to one
        (16, 1024, 0, 132),  # threads: 512 or 256 are taken of 2048
        (56, 256, 92160 + 128, 8),  # another of its kind
    ],
)
def test_what_fits_next_to_a_product(registers, threads, shared, blocks):
    assert room(LINEAR, 256, need(registers, threads, shared)) == blocks


def test_fewer_stages_make_room_for_a_block_of_the_next_product_everywhere():
    smaller = need(56, 256, 73728 + 128)
    assert room(smaller, 256, smaller) == 124 + 8 * 2


def test_a_grid_of_several_waves_fills_every_multiprocessor():
    assert room(LINEAR, 1187, need(32, 128, 0)) == 132 * 9  # 36864 registers left, 4096 each
    assert room(LINEAR, 1187, LINEAR) == 0
