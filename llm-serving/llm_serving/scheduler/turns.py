"""The share of each class while several contend: weights, paid in service.

A class pays for what it gets of the machine: of the places that requests run in and of the tokens of a step, whichever
is the larger share (dominant resource, Ghodsi et al. 2011). Whoever has paid least for its weight is next (stride
scheduling, Waldspurger and Weihl 1995).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from llm_serving.core.request_class import RequestClass
from llm_serving.scheduler.limits import SchedulerLimits

WHOLE: Final = 2**16
"""Service of a whole step."""
SCALE: Final = 2**20
"""At least the largest weight."""


class Turns:
    """Who contends, what they have paid, how many places are theirs.

    The highest class that is present contends always. One below it begins to when its oldest waiting request has waited
    `ageing_steps`, or a prompt of it has not been computed so long after it was given a place, and goes on until it
    holds no place or has nobody above it.
    """

    def __init__(self, classes: Sequence[RequestClass], limits: SchedulerLimits) -> None:
        """Classes in ascending order of rank."""
        self._names = [each.name for each in classes]
        self._weights = {each.name: each.weight for each in classes}
        self._num_places = limits.max_num_seqs
        self._budget = limits.max_num_batched_tokens
        self._turn_steps = limits.turn_steps
        self._paid = dict.fromkeys(self._names, (0, 0))
        """Service over weight, in places and in tokens; only differences count."""
        self._aged: set[str] = set()
        self._waiting: Collection[str] = ()
        self._prompts: Collection[str] = ()
        """Classes that had prompts to compute when it was last asked whose come first."""
        self.contenders: list[str] = []
        """By rank."""

    def look(self, waiting: Collection[str], aged: Collection[str], held: Mapping[str, int]) -> None:
        """Who contends from now on.

        Args:
            waiting: Classes with somebody who waits and may be admitted.
            aged: Those in which somebody has waited long enough for a place or for its prompt.
            held: Places of each class.
        """
        contenders: list[str] = []
        nobody_above_waits = True
        for name in self._names:
            if name in aged:
                self._aged.add(name)
            elif not held[name]:
                self._aged.discard(name)
            if name not in waiting and not held[name]:
                continue
            if not contenders:
                self._aged.discard(name)
            if not contenders or name in self._aged or (nobody_above_waits and name in waiting):
                contenders.append(name)
            nobody_above_waits = nobody_above_waits and name not in waiting
        self.contenders, self._waiting = contenders, waiting

    def next(self, held: Mapping[str, int]) -> str | None:
        """The class to be admitted next; None: nobody waits who may be.

        Of those that hold less than their places the one that has paid least, else the highest.
        """
        contenders = [name for name in self.contenders if name in self._waiting]
        entitled = [name for name in contenders if held[name] < self._most_places(name)]
        if entitled:
            return min(entitled, key=self._pass)  # of equals the highest class
        return contenders[0] if contenders else None

    def first(self, among: Collection[str]) -> str | None:
        """Whose prompts come first in a step, of classes that have any; None: no two have."""
        self._prompts = among
        if len(among) < 2:
            return None
        contenders = [name for name in self.contenders if name in among]
        return min(contenders or [name for name in self._names if name in among], key=self._pass)

    def num_covered(self, name: str, by: str) -> int:
        """How many places of the class a higher one that waits may not take.

        Those that its weight gives it; of a fraction of a place it has the whole for a turn, which ends when it has had
        `turn_steps` more of it than is its due.
        """
        if name not in self.contenders:
            return 0
        whole, rest = divmod(self._num_places * self._weights[name], self._sum_of_weights())
        tolerance = self._turn_steps * (WHOLE // self._num_places) * (SCALE // self._weights[name])
        return whole + (rest > 0 and self._pass(name) <= self._pass(by) + tolerance)

    def charge(self, held: Mapping[str, int], num_tokens: Mapping[str, int]) -> None:
        """A step was formed, in which each class holds so many places and has so many tokens computed."""
        for name in self._names:
            scale, (places, tokens) = SCALE // self._weights[name], self._paid[name]
            places += WHOLE * held[name] // self._num_places * scale
            tokens += WHOLE * num_tokens.get(name, 0) // self._budget * scale
            # What it did not need of the one may not be had for nothing much later.
            least = max(places, tokens) - self._turn_steps * WHOLE * scale
            self._paid[name] = max(places, least), max(tokens, least)
        # Who has all it wants, or does not contend, saves up no turns either.
        backlogged = [name for name in self.contenders if name in self._waiting or name in self._prompts]
        least = min([self._pass(name) for name in backlogged or self.contenders], default=0)
        for name, paid in self._paid.items():
            common = min(least, max(paid))
            self._paid[name] = (paid[0] - common, paid[1] - common) if name in self.contenders else (0, 0)

    def _pass(self, name: str) -> int:
        return max(self._paid[name])

    def _most_places(self, name: str) -> int:
        return -(-self._num_places * self._weights[name] // self._sum_of_weights())

    def _sum_of_weights(self) -> int:
        return sum([self._weights[name] for name in self.contenders])
