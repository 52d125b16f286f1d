"""Whether guesses pay: whether more tokens come in the same time, and hardly fewer for whoever gets none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from llm_serving.speculation.step_cost import StepCost
from llm_serving.speculation.worth import MOST_HITS, Chance, Worth, alike, expected

MOST_DELAY: Final = 0.03
"""Of a step's time: what drafts may cost requests without any, shared among all that run."""
HOST_MEMORY: Final = 16
"""Steps after which the master's measured time for one counts 1/e."""
SEARCHED_S: Final = 0.004
"""In shorter steps the search for how far to guess would take a per cent."""


class Forced(NamedTuple):
    """Of a request for which nothing but what a constraint forces is known."""

    hits: float
    """Share of right guesses."""
    num_tokens: float
    """Expected of a step."""


class Guesses(NamedTuple):
    """All that could be guessed in a step."""

    forced: Sequence[Forced]
    looked_up: Sequence[Chance]
    """Of each request whose answer is looked up."""
    proposed: Sequence[float]
    """Share of right guesses of those for which the draft model is asked."""
    num_lost: int = 0
    """Requests that have lost their guess for a moment only: they gain more by their next ones than they wait now."""


class Payoff:
    """What guesses bring, beside what steps were measured to take; times in seconds.

    Args:
        max_drafts: Most tokens that are guessed for a request at a time.
    """

    def __init__(self, max_drafts: int) -> None:
        self.step_s = 0.0
        """Of the newest step."""
        self._max_drafts = max_drafts
        self._farthest = max_drafts
        """How far to guess at most, where less brings more tokens a second or all would cost others too much."""
        self._cost = StepCost()
        self._worth: Worth | None = None
        """By the newest step."""
        self._host_s: float | None = None
        """What it costs that no step is formed ahead."""
        self._guess_s = 0.0
        """To make the guesses for a request."""

    def measured(self, num_tokens: int, seconds: float, host_s: float) -> None:
        """A step without prompts took so long; to wait for its reply costs `host_s`, where one is formed ahead."""
        self._cost.note(num_tokens, seconds)
        self._worth = None
        self.step_s = seconds
        self._host_s = host_s if self._host_s is None else self._host_s + (host_s - self._host_s) / HOST_MEMORY

    def guessed(self, seconds: float) -> None:
        """The guesses for a request took so long to make."""
        self._guess_s += (seconds - self._guess_s) / HOST_MEMORY

    def worth_of(self, num_rows: int, num_guessed: int) -> Worth:
        """Of guesses in a step of so many rows, for so many of which some may be made."""
        if self._worth is None or self._worth.num_rows != num_rows:
            self._worth = Worth(self._cost, num_rows, max(1, min(num_guessed, num_rows)), self._farthest)
        return self._worth

    def pays(self, num_rows: int, num_guessed: int, guesses: Guesses, pass_s: float) -> bool:
        """Whether guesses pay that are worth their own cost; as many for each request as bring most tokens a second.

        Args:
            num_rows: Of the step.
            num_guessed: As for `worth_of`.
            guesses: Those that could be made.
            pass_s: That a pass of the draft model takes.
        """
        if not self.step_s or not num_rows:
            return True
        num_with = len(guesses.looked_up) + len(guesses.proposed) + len(guesses.forced)
        num_without, waiting_s = max(0, num_rows - num_with - guesses.num_lost), self._waiting_s(num_with)
        self._farthest, best, best_rate = self._max_drafts, 0, 0.0
        while True:
            self._worth = None
            worth = self.worth_of(num_rows, num_guessed)
            most_s = MOST_DELAY * num_rows * worth.step_s
            if num_without * waiting_s > most_s:
                break
            gain, cost_s = self._balance(worth, guesses, pass_s)
            cost_s += waiting_s
            rate = (num_rows + gain) / (worth.step_s + cost_s)
            if rate > max(best_rate, num_rows / worth.step_s) and num_without * cost_s <= most_s:
                best, best_rate = self._farthest, rate
            elif best:
                break
            if self._farthest == 1 or worth.step_s < SEARCHED_S:
                break
            self._farthest //= 2
        if best != self._farthest:
            self._worth, self._farthest = None, best or self._max_drafts
        return best > 0

    def could_pay(self, num_rows: int) -> bool:
        """Whether more tokens would come in the same time if guesses were right for all that run."""
        step_s = self._cost.seconds_of(num_rows)
        return not step_s or any(
            expected(alike(MOST_HITS), reach)
            > (self._waiting_s(num_rows) + self._cost.further(num_rows, reach * num_rows)) / step_s
            for reach in {1, self._max_drafts}
        )

    def _balance(self, worth: Worth, guesses: Guesses, pass_s: float) -> tuple[float, float]:
        """Tokens that all guesses bring, and seconds that they cost."""
        num_drafts, gain, proposing_s = 0.0, 0.0, 0.0
        for forced in guesses.forced:
            brought = min(forced.num_tokens, worth.reach(alike(forced.hits)))
            gain += brought
            num_drafts += brought
        for chance in guesses.looked_up:
            reach, brought = worth.looked_up(chance)
            gain += brought
            num_drafts += reach
        if guesses.proposed:
            share_s, farthest = pass_s / len(guesses.proposed), 0
            for hits in guesses.proposed:
                reach = worth.reach(alike(hits), share_s)
                gain += expected(alike(hits), reach)
                num_drafts += reach
                farthest = max(farthest, reach)
            proposing_s = farthest * pass_s
        return gain, proposing_s + self._cost.further(worth.num_rows, num_drafts)

    def _waiting_s(self, num_guessed: int) -> float:
        """What guesses for so many cost a step before they are computed."""
        return (self._host_s or 0.0) + num_guessed * self._guess_s
