"""Machines with simulated WorkAgents, and their links to the master: links are slow or cut, machines are lost.

Connections behave like TCP. What was sent over a cut link arrives in order and once when the link is restored, or never
if the connection ends after some silence. A cut in one direction ends a connection as well, because acknowledgements
are missing. While a WorkAgent is started, connections of earlier starts arrive late with all their replies, and tokens
are used twice; the shipping `PendingStarts` decides which connection belongs to a start.
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
"""Direction as seen from the machine."""
BOTH: Final[tuple[Direction, ...]] = ("to", "from")
EVENTS: Final = ("slow link", "cut to", "cut from", "cut", "machine lost", "all links cut")
DISTANCE: Final = 25
"""Minimum steps between two events, so that no request is suspected because of several lost steps."""
_LONGEST_S: Final = 4.0


@dataclass(eq=False)
class Machine:
    """A machine and its link; times are those of the clock."""

    delay_s: float = 0.0
    """Seconds that a frame and its reply need together."""
    restored_at: dict[Direction, float] = field(default_factory=lambda: dict.fromkeys(BOTH, 0.0))
    cut_since: float = 0.0
    available_at: float = 0.0
    """Time at which a lost machine is available again."""
    num_losses: int = 0

    def passes(self, direction: Direction, now: float) -> bool:
        return now >= self.restored_at[direction]

    def is_reachable(self, now: float) -> bool:
        return now >= max(self.restored_at.values())


Make = Callable[["AgentLocation", list[AgentMessage]], Any]
"""Makes a WorkAgent at a location from its replies so far, which are read first; it appends further replies."""


class SimulatedNetwork:
    """The network of one server.

    Args:
        rng: Draws the events.
        clock: Advanced by waiting.
        num_machines: Number of machines.
        rate: Share of steps with an event.
        silence_s: Seconds of silence after which a connection ends.
    """

    def __init__(self, rng: random.Random, clock: Clock, num_machines: int, rate: float, silence_s: float) -> None:
        self.counts: Counter[str] = Counter()
        self._rng, self._clock, self._rate, self._silence_s = rng, clock, rate, silence_s
        self._machines = [Machine() for _ in range(num_machines)]
        self._since = rng.randrange(DISTANCE)
        self._arrivals = PendingStarts()
        self._num_starts = 0
        self._earlier: deque[tuple[str, list[AgentMessage]]] = deque(maxlen=4)
        """Token and replies of the latest starts."""

    @property
    def num_machines(self) -> int:
        return len(self._machines)

    def draw_event(self) -> None:
        """Draw the event of a step, usually none."""
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
        elif event == "all links cut":
            for each in self._machines:
                _cut(each, BOTH, now, now + seconds)
        elif event == "machine lost":
            machine.num_losses += 1
            machine.available_at = now + seconds
            _cut(machine, BOTH, now, now + seconds)
        else:
            _cut(machine, BOTH if event == "cut" else ("to" if event == "cut to" else "from",), now, now + seconds)

    def start(self, make: Make) -> Any:
        """Start a WorkAgent on one of the machines; return the one whose connection has the right token.

        Raises:
            WorkerDiedError: See `locate`.
        """
        self._num_starts += 1
        token, answers = f"start {self._num_starts}", list[AgentMessage]()
        late_connections_first = self._rng.random() < 0.5
        with self._arrivals.expect(token) as arrival:
            if late_connections_first:
                self._deliver_late_connections(make)
            self._connect(token, partial(make, self.locate(), answers))
            self._earlier.append((token, answers))
            if not late_connections_first:
                self._deliver_late_connections(make)  # including this start's connection, a second time
            made: Any = arrival.get(block=False)
            return made()

    def _deliver_late_connections(self, make: Make) -> None:
        for token, answers in self._earlier:
            self._connect(token, partial(make, AgentLocation(self, self._rng.choice(self._machines)), [*answers]))

    def _connect(self, token: str, make: Any) -> None:
        if not self._arrivals.deliver(token, make):
            self.counts["connections refused"] += 1

    def locate(self) -> AgentLocation:
        """Return the location of a new WorkAgent, on an available machine: a start does not know which links are cut.

        Raises:
            WorkerDiedError: No machine is available, or the WorkAgent does not connect.
        """
        now = self._clock()
        available = [each for each in self._machines if now >= each.available_at]
        if available:
            machine = self._rng.choice(available)
            if machine.is_reachable(now):
                return AgentLocation(self, machine)
        self._clock.now += self._rng.uniform(0.1, _LONGEST_S)
        self.counts["starts that failed"] += 1
        raise WorkerDiedError("no machine is available" if not available else "it has not connected")

    def wait(self, machine: Machine, timeout_s: float | None) -> None:
        """Wait until a machine is reachable in both directions.

        Raises:
            ChannelClosedError: The silence was too long.
            DeadlineExceededError: It took longer than `timeout_s`.
        """
        now = self._clock()
        restored, ended = max(machine.restored_at.values()), machine.cut_since + self._silence_s
        until = min(restored, ended, math.inf if timeout_s is None else now + timeout_s)
        self._clock.now = max(now, until)
        if until == restored:
            self.counts["connections that continued"] += 1
        elif until == ended:
            self.counts["connections that ended"] += 1
            raise ChannelClosedError("the peer is gone: silent")
        else:
            raise DeadlineExceededError("no complete frame arrived in time")

    def spend_delay(self, machine: Machine) -> None:
        self._clock.now += machine.delay_s


@dataclass(eq=False)
class AgentLocation:
    """The machine of one WorkAgent, from its start to its end."""

    network: SimulatedNetwork
    machine: Machine
    _num_losses: int = field(init=False)

    def __post_init__(self) -> None:
        self._num_losses = self.machine.num_losses

    @property
    def is_lost(self) -> bool:
        """Whether the machine, and so the WorkAgent, was lost since the start."""
        return self.machine.num_losses != self._num_losses

    def passes(self, direction: Direction) -> bool:
        return self.machine.passes(direction, self.network._clock())

    @property
    def is_reachable(self) -> bool:
        return self.passes("to") and self.passes("from")

    def draw_event(self) -> None:
        self.network.draw_event()

    def wait(self, timeout_s: float | None) -> None:
        self.network.wait(self.machine, timeout_s)

    def spend_delay(self) -> None:
        self.network.spend_delay(self.machine)


def _cut(machine: Machine, directions: tuple[Direction, ...], now: float, until: float) -> None:
    if machine.is_reachable(now):
        machine.cut_since = now
    for direction in directions:
        machine.restored_at[direction] = max(machine.restored_at[direction], until)
