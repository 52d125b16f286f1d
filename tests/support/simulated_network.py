"""Machines, and their links to the master, for simulated WorkAgents: links are slow or cut, machines are lost.

A connection is TCP's: what is on its way over a link that is cut arrives when that is mended, in order and once, or
never, as the connection ends after some silence. A cut in one direction ends it as well: what nobody acknowledges is
silence. While a WorkAgent is started, those of earlier starts come late, with all that they have ever answered, and
tokens are shown twice; which connection belongs to a start, the shipping `PendingStarts` decides.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

from llm_serving.errors import ChannelClosedError, DeadlineExceededError, WorkerDiedError
from llm_serving.executor.cluster.listener import PendingStarts
from llm_serving.transport.messages import AgentMessage
from support.simulated_clock import Clock

Direction = Literal["to", "from"]
"""Seen from the machine."""
BOTH: Final[tuple[Direction, ...]] = ("to", "from")
EVENTS: Final = ("slow link", "cut to", "cut from", "cut", "machine lost", "nobody reaches any machine")
DISTANCE: Final = 25
"""Steps between two events, so that nobody who is computed in each lost step looks guilty of it."""
_LONGEST_S: Final = 4.0


@dataclass(eq=False)
class Machine:
    """Seconds are those of the clock."""

    delay_s: float = 0.0
    """Of a frame to it and the answer together."""
    mended_at: dict[Direction, float] = field(default_factory=lambda: dict.fromkeys(BOTH, 0.0))
    cut_since: float = 0.0
    back_at: float = 0.0
    """When a machine that was lost serves again."""
    num_losses: int = 0

    def passes(self, direction: Direction, now: float) -> bool:
        return now >= self.mended_at[direction]

    def is_reached(self, now: float) -> bool:
        return now >= max(self.mended_at.values())


Make = Callable[["Place", list[AgentMessage]], Any]
"""Makes a WorkAgent, at a place, that has answered so much: it is read first, and what it answers then is added."""


class SimulatedNetwork:
    """Of one server.

    Args:
        rng: Draws what happens.
        clock: Goes on while something is waited for.
        rate: Share of steps at which something happens.
        silence_s: After so many seconds a connection ends.
    """

    def __init__(self, rng: random.Random, clock: Clock, num_machines: int, rate: float, silence_s: float) -> None:
        self.counts: Counter[str] = Counter()
        self._rng, self._clock, self._rate, self._silence_s = rng, clock, rate, silence_s
        self._machines = [Machine() for _ in range(num_machines)]
        self._since = rng.randrange(DISTANCE)
        self._arrivals = PendingStarts()
        self._num_starts = 0
        self._earlier: deque[tuple[str, list[AgentMessage]]] = deque(maxlen=4)
        """Token and answers of the latest starts."""

    @property
    def num_machines(self) -> int:
        return len(self._machines)

    def happen(self) -> None:
        """At a step: something, or, as a rule, nothing."""
        self._since += 1
        if self._since <= DISTANCE or self._rng.random() >= self._rate:
            return
        self._since = 0
        now, event = self._clock(), self._rng.choice(EVENTS)
        seconds = self._rng.choice((0.2, 1.0, 4.0)) * self._rng.uniform(0.0, self._silence_s)
        machine = self._rng.choice(self._machines)
        self.counts[event] += 1
        if event == "slow link":
            machine.delay_s = self._rng.choice((0.0, 0.005, 0.1))
        elif event == "nobody reaches any machine":
            for each in self._machines:
                _cut(each, BOTH, now, now + seconds)
        elif event == "machine lost":
            machine.num_losses += 1
            machine.back_at = now + seconds
            _cut(machine, BOTH, now, now + seconds)
        else:
            _cut(machine, BOTH if event == "cut" else ("to" if event == "cut to" else "from",), now, now + seconds)

    def start(self, make: Make) -> Any:
        """A WorkAgent on one of the machines: who comes in by its token, which is to be nobody else.

        Raises:
            WorkerDiedError: As for `place`.
        """
        self._num_starts += 1
        token, answers = f"start {self._num_starts}", list[AgentMessage]()
        late_ones_are_first = self._rng.random() < 0.5
        with self._arrivals.expect(token) as arrival:
            if late_ones_are_first:
                self._let_late_ones_come(make)
            self._come(token, partial(make, self.place(), answers))
            self._earlier.append((token, answers))
            if not late_ones_are_first:
                self._let_late_ones_come(make)  # and it itself once more
            made: Any = arrival.wait(0.0)
            return made()

    def _let_late_ones_come(self, make: Make) -> None:
        for token, answers in self._earlier:
            self._come(token, partial(make, Place(self, self._rng.choice(self._machines)), [*answers]))

    def _come(self, token: str, make: Any) -> None:
        if not self._arrivals.deliver(token, make):
            self.counts["connections turned away"] += 1

    def place(self) -> Place:
        """Where a WorkAgent is started. Who starts it does not know which links are cut.

        Raises:
            WorkerDiedError: No machine is there, or the WorkAgent does not come.
        """
        now = self._clock()
        there = [each for each in self._machines if now >= each.back_at]
        if there:
            machine = self._rng.choice(there)
            if machine.is_reached(now):
                return Place(self, machine)
        self._clock.now += self._rng.uniform(0.1, _LONGEST_S)
        self.counts["starts that failed"] += 1
        raise WorkerDiedError("no machine is there" if not there else "it has not come")

    def wait(self, machine: Machine, timeout_s: float | None) -> None:
        """Waits until a machine is reached in both directions.

        Raises:
            ChannelClosedError: The silence was too long.
            DeadlineExceededError: It took longer than `timeout_s`.
        """
        now = self._clock()
        mended, ended = max(machine.mended_at.values()), machine.cut_since + self._silence_s
        until = min(mended, ended, math.inf if timeout_s is None else now + timeout_s)
        self._clock.now = max(now, until)
        if until == mended:
            self.counts["connections that went on"] += 1
        elif until == ended:
            self.counts["connections that ended"] += 1
            raise ChannelClosedError("the peer is gone: silent")
        else:
            raise DeadlineExceededError("no complete frame arrived in time")

    def take_time(self, machine: Machine) -> None:
        self._clock.now += machine.delay_s


@dataclass(eq=False)
class Place:
    """Of one WorkAgent, from its start to its end."""

    network: SimulatedNetwork
    machine: Machine
    _num_losses: int = field(init=False)

    def __post_init__(self) -> None:
        self._num_losses = self.machine.num_losses

    @property
    def is_lost(self) -> bool:
        """Whether the machine was lost since, and with it whatever ran there."""
        return self.machine.num_losses != self._num_losses

    def passes(self, direction: Direction) -> bool:
        return self.machine.passes(direction, self.network._clock())

    @property
    def is_reached(self) -> bool:
        return self.passes("to") and self.passes("from")

    def happen(self) -> None:
        self.network.happen()

    def wait(self, timeout_s: float | None) -> None:
        self.network.wait(self.machine, timeout_s)

    def take_time(self) -> None:
        self.network.take_time(self.machine)


def _cut(machine: Machine, directions: tuple[Direction, ...], now: float, until: float) -> None:
    if machine.is_reached(now):
        machine.cut_since = now
    for direction in directions:
        machine.mended_at[direction] = max(machine.mended_at[direction], until)
