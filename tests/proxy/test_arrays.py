"""Arrays that grow: content as of plain numpy, cost and memory near the rows' own."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from legorl.proxy.arrays import Blocks, Growing


def test_growing_arrays_stay_near_their_own_size() -> None:
    array = Growing(np.int32)
    copies, capacity = 0, 0
    for _ in range(20_000):
        array.append(np.arange(10, dtype=np.int32))
        if len(array._data) != capacity:
            copies, capacity = copies + len(array), len(array._data)
    assert capacity <= len(array) * 1.13
    assert copies < 12 * len(array)
    array.cut(5)
    array.append(np.array([9], np.int32))
    assert array.view.tolist() == [0, 1, 2, 3, 4, 9]


STEPS = st.lists(
    st.tuples(st.sampled_from(["append", "fill", "cut", "fork"]), st.integers(0, 9)), max_size=12
)


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_blocks_hold_what_one_array_would(steps: list[tuple[str, int]]) -> None:
    blocks, rows, next_row = Blocks(np.uint8, (2, 3)), np.zeros((0, 2, 3), np.uint8), 0
    earlier = []
    for step, count in steps:
        if step == "append":
            new = np.arange(next_row, next_row + count * 6).astype(np.uint8).reshape(count, 2, 3)
            next_row += 6 * count
            blocks.append(new)
            rows = np.concatenate([rows, new])
            new[:] = 0  # the caller's own array
        elif step == "fill":
            blocks.fill(count, 7)
            rows = np.concatenate([rows, np.full((count, 2, 3), 7, np.uint8)])
        elif step == "cut":
            blocks.cut(count)
            rows = rows[:count]
        else:
            earlier.append((blocks, rows))
            blocks, rows = blocks.head(count), rows[:count]
    for held, expected in [*earlier, (blocks, rows)]:
        assert len(held) == len(expected)
        assert np.array_equal(held.joined(), expected)
        part = np.zeros((4, 2, 3), np.uint8)
        held.copy_to(part)
        assert np.array_equal(part[: len(expected)], expected[:4])
        assert not part[len(expected) :].any()


def test_a_fork_of_blocks_holds_the_same_memory() -> None:
    blocks = Blocks(np.uint8, (40, 8))
    for _ in range(3):
        blocks.append(np.ones((100, 40, 8), np.uint8))
    fork = blocks.head(250)
    assert all(np.shares_memory(a, b) for a, b in zip(fork._blocks, blocks._blocks, strict=True))
    fork.append(np.zeros((1, 40, 8), np.uint8))
    assert len(blocks) == 300
    assert blocks.joined().all()
    held = sum(block.nbytes for block in blocks._blocks)
    assert held == 300 * 40 * 8
