"""Who goes first: the order of requests and the order of stages within a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from llm_serving.config.schema import SchedulerConfig
from llm_serving.core.request import Request


class Policy(Protocol):
    def queue_key(self, request: Request, step: int) -> tuple[int, int]:
        """The request's fixed place among all others, smaller first, given on its arrival at `step`."""

    def prefill_goes_first(self, decode_gap: int) -> bool:
        """Whether prompts get this step's tokens before running requests.

        `decode_gap` is the number of steps that the longest-waiting decoding request has been left out.
        """


class PrefillFirst:
    """Prompts before decoding, so that first tokens come early; higher priority before lower.

    Both favours are bounded. A decoding request is left out of at most `max_consecutive_prefill_steps` steps in a row;
    then all of them go first. A request one priority level below another overtakes it once it has been there
    `priority_ageing_steps` steps longer: the key is static, so the queue is never sorted again.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._ageing_steps = config.priority_ageing_steps
        self._max_prefill_steps = config.max_consecutive_prefill_steps

    def queue_key(self, request: Request, step: int) -> tuple[int, int]:
        return (request.priority * self._ageing_steps + step, request.sequence)

    def prefill_goes_first(self, decode_gap: int) -> bool:
        return decode_gap < self._max_prefill_steps


class Fcfs:
    """First come, first served: running requests, then prompts in order of arrival, whatever their priority."""

    def __init__(self, config: SchedulerConfig) -> None:
        del config

    def queue_key(self, request: Request, step: int) -> tuple[int, int]:
        del step
        return (0, request.sequence)

    def prefill_goes_first(self, decode_gap: int) -> bool:
        del decode_gap
        return False


POLICIES: dict[str, Callable[[SchedulerConfig], Policy]] = {"prefill_first": PrefillFirst, "fcfs": Fcfs}
