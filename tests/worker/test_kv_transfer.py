"""The KV transfer pool and the thread that serves it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from families import models
from llm_serving.core.step import BlockMoveKind
from llm_serving.errors import ChannelClosedError, WorkerError
from llm_serving.models.spec import ModelSpec
from llm_serving.transport.messages import MasterMessage, ReadBlocks
from llm_serving.transport.shared_memory import transfer_memory
from llm_serving.worker.kv_cache import KVTensors, TransferMemory
from llm_serving.worker.kv_transfer import SHARE, BackgroundThrottle, serve_blocks
from support.fake_runner import FakeTransferPool
from support.graph_model import backend
from support.step_factories import block_moves

SHAPES = ((4, 2, 3), (4, 6))
BLOCK_BYTES = 2 * (6 * 2 + 6 * 1)


def memory() -> Iterator[TransferMemory]:
    fd = os.memfd_create("transfer")
    caches: Any = [
        SimpleNamespace(shape=(9, *shape[1:]), dtype=dtype)
        for shape, dtype in zip(SHAPES, (ms.bfloat16, ms.int8), strict=True)
    ]
    yield TransferMemory(fd, 4, [(caches[0], caches[0]), (caches[1], caches[1])])
    os.close(fd)


here, there = pytest.fixture(memory, name="here"), pytest.fixture(memory, name="there")


def fill(pool: TransferMemory) -> None:
    rng = np.random.default_rng(0)
    for array in (each for layer in pool.layers for each in layer):
        array[:] = rng.integers(0, 100, array.shape)
    pool.epochs[:] = 5, 6, 7, 8
    pool.num_written[:] = 4, 4, 3, 0


@pytest.mark.mindspore
def test_state_is_transferred_in_pieces_of_a_block(tmp_path: Path) -> None:
    """With an int8 cache a block is smaller than a state."""
    models.write("lfm2", tmp_path)
    spec = ModelSpec.from_folder(tmp_path)
    given = KVTensors.allocate(spec, backend("cpu", "bfloat16"), 2, 16, num_state_slots=3, int8=True)
    assert given.block_bytes < spec.state_bytes < 2 * given.block_bytes
    with transfer_memory() as fd:
        tensors = replace(given, transfer=TransferMemory(fd, 6, given.layers))
        rng = np.random.default_rng(0)
        for states in tensors.states:
            states.storage[:] = rng.standard_normal(states.storage.shape)
        before = [states.storage.copy() for states in tensors.states]
        out, back = BlockMoveKind.EXPORT_STATE, BlockMoveKind.IMPORT_STATE
        tensors.move_blocks(block_moves((out, 2, 5), (out, 1, 0), (out, 2, 3), (out, 1, 1)))
        tensors.move_blocks(block_moves((back, 5, 0), (back, 3, 0)))
        for states, old in zip(tensors.states, before, strict=True):
            assert np.array_equal(states.storage, old[[2, 1, 2]])


def test_a_transferred_block_arrives_in_all_layers(here: TransferMemory, there: TransferMemory) -> None:
    fill(here)
    num_written, content = here.read([2, 0], [7, 5])
    assert (num_written, len(content)) == ([3, 4], 2 * BLOCK_BYTES)
    there.write([2, 0], [7, 5], num_written, content)
    for ours, theirs in zip(here.layers, there.layers, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (other[[2, 0]] == one[[2, 0]]).all()
            assert not other[[1, 3]].any()
    assert (there.epochs.tolist(), there.num_written.tolist()) == ([5, 0, 7, 0], [4, 0, 3, 0])
    assert there.read([0], [5]) == here.read([0], [5])


@pytest.mark.parametrize(
    ("block_ids", "epochs", "rule"),
    [
        ([0], [6], "block 0 of the transfer pool does not hold the contents of epoch 6"),
        ([0, 3], [5, 8], "block 3 of the transfer pool does not hold the contents of epoch 8"),
        ([4], [5], "blocks of the transfer pool must be from 0 to 3. Given: [4]"),
        ([-1], [8], "blocks of the transfer pool must be from 0 to 3. Given: [-1]"),
        ([0, 0], [5, 5], "each block of the transfer pool must be given once, with its epoch. Given: blocks [0, 0]"),
        ([0, 1], [5], "each block of the transfer pool must be given once, with its epoch. Given: blocks [0, 1]"),
        ([], [], "each block of the transfer pool must be given once, with its epoch. Given: blocks []"),
    ],
)
def test_reading_a_missing_block_is_an_error(
    here: TransferMemory, block_ids: list[int], epochs: list[int], rule: str
) -> None:
    fill(here)
    with pytest.raises(WorkerError, match=re.escape(rule)):
        here.read(block_ids, epochs)


@pytest.mark.parametrize(
    ("epochs", "num_written"), [([1, 2], [4, 0]), ([1, 2], [-1, 4]), ([1, 2], [4, 2**40]), ([1, 2**31], [4, 4])]
)
def test_invalid_token_counts_are_rejected_without_a_change(
    here: TransferMemory, epochs: list[int], num_written: list[int]
) -> None:
    fill(here)
    before = here.read([0, 1, 2], [5, 6, 7])
    with pytest.raises(WorkerError, match="blocks must have 1 to 65536 tokens each and epochs up to 2147483647"):
        here.write([0, 1], epochs, num_written, bytes(2 * BLOCK_BYTES))
    assert here.read([0, 1, 2], [5, 6, 7]) == before


@pytest.mark.parametrize(
    ("block_ids", "num_written", "num_bytes", "rule"),
    [
        ([0, 1], [4, 4], 2 * BLOCK_BYTES + 1, "Given: 73 bytes, 2 numbers"),
        (
            [0, 1],
            [4, 4],
            BLOCK_BYTES,
            "2 blocks must come with 72 bytes, and a number of tokens for each. Given: 36 bytes",
        ),
        ([0, 1], [4], 2 * BLOCK_BYTES, "Given: 72 bytes, 1 numbers"),
        ([0, 4], [4, 4], 2 * BLOCK_BYTES, "blocks of the transfer pool must be from 0 to 3. Given: [0, 4]"),
        ([1, 1], [4, 4], 2 * BLOCK_BYTES, "each block of the transfer pool must be given once"),
    ],
)
def test_invalid_contents_are_rejected_without_a_change(
    here: TransferMemory, block_ids: list[int], num_written: list[int], num_bytes: int, rule: str
) -> None:
    fill(here)
    before = here.read([0, 1, 2], [5, 6, 7])
    with pytest.raises(WorkerError, match=re.escape(rule)):
        here.write(block_ids, [1] * len(block_ids), num_written, bytes(num_bytes))
    assert here.read([0, 1, 2], [5, 6, 7]) == before


TIMES = 1 / SHARE - 1


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def beside(pauses: list[float]) -> BackgroundThrottle:
    return BackgroundThrottle(pauses.append)


def test_throttle_pauses_after_a_piece_during_a_step(beside: BackgroundThrottle, pauses: list[float]) -> None:
    with beside.step_running():
        beside.pause_after(0.002)
        beside.pause_after(0.001)
    assert pauses == pytest.approx([0.002 * TIMES, 0.001 * TIMES])


def test_throttle_pauses_after_a_step_between_two_pieces(beside: BackgroundThrottle, pauses: list[float]) -> None:
    with beside.step_running():
        pass
    beside.pause_after(0.002)
    beside.pause_after(0.002)
    assert pauses == pytest.approx([0.002 * TIMES])


def test_throttle_does_not_pause_without_steps(beside: BackgroundThrottle, pauses: list[float]) -> None:
    beside.pause_after(1.0)
    assert not pauses


def test_throttle_ignores_a_failed_step(beside: BackgroundThrottle, pauses: list[float]) -> None:
    with pytest.raises(ValueError), beside.step_running():
        raise ValueError
    beside.pause_after(1.0)
    beside.pause_after(1.0)
    assert len(pauses) == 1


class Channel:
    """A channel that requests the same block `count` times."""

    def __init__(self, count: int) -> None:
        self._left = count

    def receive(self) -> MasterMessage:
        if not self._left:
            raise ChannelClosedError
        self._left -= 1
        return ReadBlocks([0], [0])

    def send(self, message: object) -> None:
        pass


def test_serve_blocks_passes_the_cpu_time_of_each_frame() -> None:
    times: Iterator[float] = iter([0.0, 1.0, 3.0, 6.0])
    durations: list[float] = []
    with pytest.raises(ChannelClosedError):
        serve_blocks(Channel(3), FakeTransferPool(1), durations.append, times.__next__)  # type: ignore[arg-type]
    assert durations == [1.0, 2.0, 3.0]
