"""The guesses of a simulated server: found, trusted and weighed by what ships, in texts that the load has."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Final

from llm_serving.config.schema import ServingConfig
from llm_serving.core.request import FINISHED, Request
from llm_serving.speculation.drafter import FINISHED_TOKENS, Drafter
from llm_serving.speculation.finished_answers import FinishedAnswers, Int64Array
from llm_serving.speculation.guess_state import GuessState
from llm_serving.whatif.virtual_agent import VirtualAgent

FOLLOW_S: Final = 4e-6
"""What the master of two Zen 4 cores takes to follow a step, without what is counted for itself:"""
COMPARE_S: Final = 2.5e-6
"""the tokens of a request that is followed with what was guessed,"""
LOOKING_S: Final = 8e-6
"""to look for a guess,"""
WEIGH_S: Final = 14e-6
"""to find out whether guesses pay,"""
GUESS_S: Final = 4e-6
"""and to make those for a request."""


class VirtualDrafter(Drafter):
    """What it does takes no virtual time, but counts as what it takes: by that it is decided how often it is done.

    Steps count as they do for a master that notes when a reply is there and takes it then, where the virtual clock goes
    on before the engine reads it.
    """

    def __init__(self, config: ServingConfig, agent: VirtualAgent) -> None:
        scheduler = config.scheduler
        self._worked_s = 0.0
        """All that it has done."""
        reach, length = scheduler.num_speculative_tokens, scheduler.prompt_lookup_min
        finished = FinishedAnswers(length, FINISHED_TOKENS, table=TakenSlots, salt=_salt_of)
        super().__init__(reach, length, clock=lambda: self._worked_s, finished=finished)
        self.settle: Callable[[Request], None] = as_it_is
        """Has a request that is about to be looked at be as it would be."""
        self._agent, self._ahead = agent, scheduler.async_scheduling

    def measured(self, num_tokens: int, seconds: float, host_s: float) -> None:
        agent = self._agent
        super().measured(num_tokens, agent.computed_s, host_s + agent.taken_s if self._ahead else 0.0)

    def _compare(self) -> None:
        self._worked_s += FOLLOW_S + COMPARE_S * len(self._followed)
        for request in self._followed:
            if request.status is not FINISHED:
                self.settle(request)
        super()._compare()

    def _look(self, request: Request, state: GuessState) -> None:
        self.settle(request)
        self._worked_s += LOOKING_S
        super()._look(request, state)

    def _pays(self, num_rows: int, asked: Mapping[Request, GuessState]) -> bool:
        self._worked_s += WEIGH_S
        return super()._pays(num_rows, asked)

    def _guess(self, request: Request, state: GuessState, num_running: int, proposed: list[int]) -> list[int]:
        self._worked_s += GUESS_S
        return super()._guess(request, state, num_running, proposed)


class TakenSlots:
    """A table that takes memory for the slots that are not 0: there is one for each of many replicas."""

    def __init__(self, num_slots: int) -> None:
        self._places: dict[int, int] = {}

    def __getitem__(self, slot: int) -> int:
        return self._places.get(slot, 0)

    def __setitem__(self, slots: Int64Array, places: Int64Array) -> None:
        self._places.update(zip(slots.tolist(), places.tolist(), strict=True))


def _salt_of(namespace: str) -> int:
    """The same in every process, unlike the hash of a string: by that the same seed gives the same guesses."""
    return zlib.crc32(namespace.encode()) << 32  # slots are chosen by the upper bits


def as_it_is(request: Request) -> None:
    """It is looked at in every step."""
