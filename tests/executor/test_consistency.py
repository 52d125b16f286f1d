"""All WorkAgents of a server have the same compute fingerprint, or do not serve."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from llm_serving.core.fingerprint import ComputeFingerprint
from llm_serving.errors import WorkerDiedError
from llm_serving.executor.supervisor import ConsistencyCheck
from llm_serving.transport.messages import Loaded

WIDE = ComputeFingerprint(
    kernels="program", instruction_set="avx512_bf16", sources="a", compiler="b", framework="2.10.0"
)


class Agent:
    def __init__(self, index: int, compute_fingerprint: ComputeFingerprint) -> None:
        self.index = index
        self.loaded = Loaded(8, 0, "", compute_fingerprint)
        self.is_killed = False

    def kill(self) -> None:
        self.is_killed = True


def test_consistency_check_accepts_equal_fingerprints() -> None:
    consistency = ConsistencyCheck()
    agents: list[Any] = [Agent(index, WIDE) for index in range(3)]
    assert [consistency.check(agent) for agent in agents] == agents


@pytest.mark.parametrize("field", ComputeFingerprint.__struct_fields__)
def test_consistency_check_kills_an_agent_with_another_fingerprint(field: str) -> None:
    consistency = ConsistencyCheck()
    first: Any = Agent(1, WIDE)
    consistency.check(first)
    other: Any = Agent(0, msgspec.structs.replace(WIDE, **{field: "other"}))
    message = (
        f"WorkAgent 0 would compute different answers than WorkAgent 1: {field} is other, not {getattr(WIDE, field)}"
    )
    with pytest.raises(WorkerDiedError, match=message):
        consistency.check(other)
    assert other.is_killed
    assert not first.is_killed
