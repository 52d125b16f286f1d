"""Blocks on their way: whoever waits for them hears of their end, whatever it is."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import pytest
from llm_serving.engine.carrier import Carrier
from llm_serving.errors import WorkerDiedError
from llm_serving.kvcache.exports import TransferBlock
from llm_serving.transport.messages import Blocks


class FailingLink:
    blocks_a_frame = 2

    def __init__(self, error: Exception) -> None:
        self._error = error

    def read(self, blocks: Sequence[TransferBlock]) -> Blocks:
        raise self._error

    def write(self, blocks: Blocks) -> None:
        raise AssertionError("nothing was read")


@pytest.mark.parametrize("error", [WorkerDiedError("gone"), MemoryError(), ValueError("a fault of ours")], ids=repr)
def test_what_cannot_be_brought_is_told(error: Exception) -> None:
    carrier, told = Carrier(), Future[bool]()
    link = FailingLink(error)
    carrier.carry(0, [(1, 1), (2, 1), (3, 1)], link, link, told.set_result)
    assert told.result(timeout=60) is False
    carrier.close()
