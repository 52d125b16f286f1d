"""WorkAgents of one server give the same answers, or do not serve."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from llm_serving.core.fingerprint import ComputeFingerprint
from llm_serving.errors import WorkerDiedError
from llm_serving.executor.consistency import SameBits
from llm_serving.transport.messages import Loaded

WIDE = ComputeFingerprint(
    kernels="program", instruction_set="avx512_bf16", sources="a", compiler="b", framework="2.10.0"
)


class Agent:
    def __init__(self, index: int, computed_by: ComputeFingerprint) -> None:
        self.index = index
        self.loaded = Loaded(8, 0, "", computed_by)
        self.is_killed = False

    def kill(self) -> None:
        self.is_killed = True


def test_those_that_compute_alike_serve() -> None:
    same_bits = SameBits()
    agents: list[Any] = [Agent(index, WIDE) for index in range(3)]
    assert [same_bits.agreed(agent) for agent in agents] == agents


@pytest.mark.parametrize("field", ComputeFingerprint.__struct_fields__)
def test_one_that_computes_otherwise_is_ended_and_what_differs_is_told(field: str) -> None:
    same_bits = SameBits()
    first: Any = Agent(1, WIDE)
    same_bits.agreed(first)
    other: Any = Agent(0, msgspec.structs.replace(WIDE, **{field: "other"}))
    said = f"WorkAgent 0 would give other answers than WorkAgent 1: {field} other and {getattr(WIDE, field)}"
    with pytest.raises(WorkerDiedError, match=said):
        same_bits.agreed(other)
    assert other.is_killed
    assert not first.is_killed
