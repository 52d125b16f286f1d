"""Speculative decoding of a simulated server: the shipping controller, on the texts of the load."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Final

from llm_serving.config.schema import ServingConfig
from llm_serving.core.request import Request
from llm_serving.speculation import NgramProposer, SpeculationController
from llm_serving.speculation.ngram import FINISHED_TOKENS, FinishedAnswersIndex, Int64Array, RequestDrafts

from llm_serving_simulator.virtual_agent import VirtualAgent

UPDATE_S: Final = 4e-6
"""Time that the master of two Zen 4 cores takes for an update of the drafts, without the following:"""
COMPARE_S: Final = 2.5e-6
"""the comparison of a request's output with its draft,"""
LOOKUP_S: Final = 8e-6
"""a lookup,"""
EVALUATE_S: Final = 14e-6
"""the decision whether drafts pay,"""
PROPOSE_S: Final = 4e-6
"""and the draft of one request."""


class VirtualNgramProposer(NgramProposer):
    """Counts the time that its work takes on a real master."""

    def __init__(self, config: ServingConfig) -> None:
        length = config.scheduler.prompt_lookup_min
        self.worked_s = 0.0
        """Time of all its work and of its controller's."""
        self.settle: Callable[[Request], None] = keep_state
        """Brings a request that is about to be read up to date."""
        finished = FinishedAnswersIndex(length, FINISHED_TOKENS, table=SparseTable, salt=_salt_of)
        super().__init__(length, finished, lambda: self.worked_s)

    def _compare(self) -> None:
        self.worked_s += UPDATE_S + COMPARE_S * len(self.matched)
        for request in self.matched:
            self.settle(request)
        super()._compare()

    def _look_up(self, request: Request) -> None:
        self.settle(request)
        self.worked_s += LOOKUP_S
        super()._look_up(request)


class VirtualSpeculationController(SpeculationController):
    """Takes no virtual time, but counts its work, by which it decides how often it updates the drafts.

    Step times are those of a master that notices a reply at once and processes it then, where the virtual clock
    advances before the engine reads it.
    """

    def __init__(self, config: ServingConfig, agent: VirtualAgent) -> None:
        self.ngram = VirtualNgramProposer(config)
        super().__init__(config.scheduler.num_speculative_tokens, self.ngram, clock=lambda: self.ngram.worked_s)
        self._agent, self._ahead = agent, config.scheduler.async_scheduling

    def record_step_time(self, num_tokens: int, seconds: float, host_s: float) -> None:
        agent = self._agent
        super().record_step_time(num_tokens, agent.computed_s, host_s + agent.taken_s if self._ahead else 0.0)

    def _evaluate(self, num_rows: int, model: Mapping[Request, RequestDrafts]) -> bool:
        self.ngram.worked_s += EVALUATE_S
        return super()._evaluate(num_rows, model)

    def _propose_for(self, request: Request, drafts: RequestDrafts, model_draft: list[int]) -> list[int]:
        self.ngram.worked_s += PROPOSE_S
        return super()._propose_for(request, drafts, model_draft)


class SparseTable:
    """A slot table that stores only the slots that are not 0: a simulation has one for each of many replicas."""

    def __init__(self, num_slots: int) -> None:
        self._values: dict[int, int] = {}

    def __getitem__(self, slot: int) -> int:
        return self._values.get(slot, 0)

    def __setitem__(self, slots: Int64Array, values: Int64Array) -> None:
        self._values.update(zip(slots.tolist(), values.tolist(), strict=True))


def _salt_of(namespace: str) -> int:
    """Return the same number in every process, unlike the hash of a string, so that a seed gives the same drafts."""
    return zlib.crc32(namespace.encode()) << 32  # slots are chosen by the upper bits


def keep_state(request: Request) -> None:
    """Do nothing: the request is updated in every step."""
