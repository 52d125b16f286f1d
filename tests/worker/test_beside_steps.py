"""What a WorkAgent does beside its steps leaves most of the time to them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from llm_serving.errors import ChannelClosedError
from llm_serving.transport.messages import MasterMessage, SendBlocks
from llm_serving.worker.kv_transfer import SHARE, BesideSteps, exchange_blocks
from support.fake_runner import FakeTransferPool

TIMES = 1 / SHARE - 1


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def beside(pauses: list[float]) -> BesideSteps:
    return BesideSteps(pauses.append)


def test_a_piece_is_followed_by_a_rest_while_a_step_is_computed(beside: BesideSteps, pauses: list[float]) -> None:
    with beside.step():
        beside.rest(0.002)
        beside.rest(0.001)
    assert pauses == pytest.approx([0.002 * TIMES, 0.001 * TIMES])


def test_a_step_between_two_pieces_counts_although_it_has_ended(beside: BesideSteps, pauses: list[float]) -> None:
    with beside.step():
        pass
    beside.rest(0.002)
    beside.rest(0.002)
    assert pauses == pytest.approx([0.002 * TIMES])


def test_without_steps_there_is_no_rest(beside: BesideSteps, pauses: list[float]) -> None:
    beside.rest(1.0)
    assert not pauses


def test_a_step_that_failed_is_none_that_is_computed(beside: BesideSteps, pauses: list[float]) -> None:
    with pytest.raises(ValueError), beside.step():
        raise ValueError
    beside.rest(1.0)
    beside.rest(1.0)
    assert len(pauses) == 1


class Channel:
    """Asks for the same block again and again, as often as said."""

    def __init__(self, count: int) -> None:
        self._left = count

    def receive(self) -> MasterMessage:
        if not self._left:
            raise ChannelClosedError
        self._left -= 1
        return SendBlocks([0], [0])

    def send(self, message: object) -> None:
        pass


def test_each_frame_is_followed_by_a_rest_that_is_told_how_long_it_took() -> None:
    times: Iterator[float] = iter([0.0, 1.0, 3.0, 6.0])
    took: list[float] = []
    with pytest.raises(ChannelClosedError):
        exchange_blocks(Channel(3), FakeTransferPool(1), took.append, times.__next__)  # type: ignore[arg-type]
    assert took == [1.0, 2.0, 3.0]
