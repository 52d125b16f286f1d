"""When a simulation need not go on: whatever still comes, a constraint stays broken."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from llm_serving.core.request_class import RequestClass, class_of

from llm_serving_simulator.load import Load
from llm_serving_simulator.outcome import Outcome
from llm_serving_simulator.tuner.goal import Constraint, Goal

LONGEST: Final = 4.0
"""Times what the configuration to begin with takes for the load, after which a trial is given up."""


@dataclass
class Hopeless:
    """Asked now and then, says whether to give up.

    Args:
        goal: What is wanted.
        load: What comes.
        classes: Of the configuration.
        longest_s: What the configuration to begin with takes.
        strict: Whether to give up as soon as a constraint is lost: when another is known that keeps all of them.
            Otherwise how far each misses them is of interest.
    """

    goal: Goal
    load: Load
    classes: Sequence[RequestClass]
    longest_s: float
    strict: bool

    def __post_init__(self) -> None:
        counts: Counter[str] = Counter()
        for stream in self.load.streams:
            for each in stream.requests:
                name = class_of(each.priority_in(self.classes), self.classes).name
                counts.update(("", name, f"tenant {each.tenant}"))
        self._watched = [
            (each, watch, counts[each.figure.group])
            for each in self.goal.constraints
            if (watch := WATCHED.get(each.figure.name)) is not None
        ]

    def __call__(self, outcomes: Sequence[Outcome], now: float) -> bool:
        """Args:
        outcomes: Of the requests that have come.
        now: Virtual seconds.
        """
        if now > LONGEST * self.longest_s:
            return True
        return self.strict and any(
            watch(_members(outcomes, each.figure.group), each, now) > _allowed(each, count)
            for each, watch, count in self._watched
        )


def _members(outcomes: Sequence[Outcome], group: str) -> Sequence[Outcome]:
    if not group:
        return outcomes
    if group.startswith("tenant "):
        tenant = group.removeprefix("tenant ")
        return [each for each in outcomes if each.tenant == tenant]
    return [each for each in outcomes if each.request_class.name == group]


def _late_first_tokens(outcomes: Sequence[Outcome], constraint: Constraint, now: float) -> int:
    limit_s = constraint.aim / 1e3
    return sum(
        (each.token_times_s[0] if each.token_times_s else now) - each.due_s > limit_s
        for each in outcomes
        if each.finish in ("", "stop", "length")
    )


def _late_ends(outcomes: Sequence[Outcome], constraint: Constraint, now: float) -> int:
    limit_s = constraint.aim / 1e3
    return sum(
        (each.end_s if each.finish else now) - each.due_s > limit_s
        for each in outcomes
        if each.finish in ("", "stop", "length")
    )


def _broken_promises(outcomes: Sequence[Outcome], constraint: Constraint, now: float) -> int:
    return sum(bool(each.finish) and not each.met_slo for each in outcomes)


def _refused(outcomes: Sequence[Outcome], constraint: Constraint, now: float) -> int:
    return sum(each.finish == "refused" for each in outcomes)


def _allowed(constraint: Constraint, count: int) -> float:
    """Of so many requests, those that may miss a constraint without its being lost."""
    name = constraint.figure.name
    if name == "refused":
        return constraint.aim
    if name == "goodput_share":
        return (1 - constraint.aim) * count
    share = 0.01 if "_p99_" in name else 0.5
    return math.ceil(share * count) + 1  # the percentile lies between two of them


Watch = Callable[[Sequence[Outcome], Constraint, float], int]
WATCHED: Final[dict[str, Watch]] = {
    "ttft_p50_ms": _late_first_tokens,
    "ttft_p99_ms": _late_first_tokens,
    "latency_p50_ms": _late_ends,
    "latency_p99_ms": _late_ends,
    "goodput_share": _broken_promises,
    "refused": _refused,
}
"""How many requests miss a constraint on this figure already."""
