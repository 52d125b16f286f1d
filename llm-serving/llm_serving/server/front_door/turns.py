"""What all clients together may take of one turn of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from starlette.types import ASGIApp, Receive, Scope, Send

TURN_S: Final = 0.002
"""Seconds of work that clients can make many of, in one turn of the loop; what goes beyond waits for the next. Whatever
begins in a turn has consequences of the same length in those that follow, and a request passes half a dozen turns."""
RELEASED_AT_ONCE: Final = 8
"""Tasks that waited and go on in one turn, at most."""
RIDES: Final = 8
"""Connections whose first bytes are looked at in one turn although its time is used up, at most."""
NEW_IN_A_ROW: Final = 3
"""Addresses that did not wait before and go first, between two of those that did."""
PART: Final = 0.25
"""Of a turn, for one piece of work that can be broken off."""
FORGETS: Final = 0.125
"""How much less each step that was short counts those before it that were long."""


_Queue = deque[Callable[[], None]]


class Turns:
    """Hands out the time of the event loop among addresses, so that nobody waits for more than a little of the others.

    A loop runs all that is ready before it looks for what has come since; a thousand clients that connect, ask or fall
    silent at once would make everybody wait for all of them. Here what exceeds a turn waits for a later one, and in
    later ones each address has one piece of work after the other: a probe from elsewhere passes the thousand.

    An address of which nothing waited goes before those that wait on, with its first piece, as sparse flows do in
    FQ-CoDel (RFC 8290, section 4.2): what asks for little passes each of its turns soon. So that nobody with many
    addresses keeps the others out, each fourth piece is one of theirs.

    While a turn has time left and nobody waits, work is done at once.

    Args:
        loop: Its thread makes all calls.
        budget_s: Seconds of a turn.
        clock: Seconds; tests bring their own.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        budget_s: float = TURN_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._loop = loop
        self._budget_s = budget_s
        self._clock = clock
        self._new: OrderedDict[str, _Queue] = OrderedDict()
        self._old: OrderedDict[str, _Queue] = OrderedDict()
        """Those that have had a turn; an empty one is forgotten when it would have the next."""
        self._num_waiting = 0
        self._num_new_in_a_row = 0
        self._spent_s = 0.0
        self._num_released = 0
        self._num_rides = 0
        self._step_s = budget_s / 2
        """What a step that has waited is expected to take."""
        self._is_scheduled = False
        self._is_inside = False
        self._weight = 1.0

    @property
    def has_time(self) -> bool:
        """Whether work may be done at once."""
        return self._spent_s < self._budget_s and not self._num_waiting

    def take_ride(self) -> bool:
        """Whether somebody who has waited for a turn may go on in this one; only a few may."""
        self._schedule()
        self._num_rides += 1
        return self._num_rides <= RIDES

    def do(self, address: str, work: Callable[[], None]) -> None:
        """Does it in this turn, or when it is the address's turn."""
        if self.has_time:
            with self.counted():
                work()
        else:
            self.do_later(address, work)

    def do_later(self, address: str, work: Callable[[], None]) -> None:
        """Does it when it is the address's turn, not before others had theirs."""
        queue = self._old.get(address)
        (self._new.setdefault(address, deque()) if queue is None else queue).append(work)
        self._num_waiting += 1
        self._schedule()

    async def wait(self, address: str, expected_s: float | None = None) -> None:
        """Returns when it is the address's turn.

        Args:
            address: Of the client.
            expected_s: Seconds that the caller goes on for; None: as long as other steps that have waited.
        """
        waiter = self._loop.create_future()
        self.do_later(address, partial(self._release, waiter, expected_s))
        await waiter

    async def spend(self, address: str, expected_s: float) -> None:
        """Returns in this turn, or when it is the address's turn; what the caller goes on with takes so long."""
        if self.has_time:
            self._schedule()
            self._spent_s += expected_s
        else:
            await self.wait(address, expected_s)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """What is done inside counts towards the turn."""
        began = self.begin()
        try:
            yield
        finally:
            self.end(began)

    def begin(self) -> float | None:
        """Work begins; the result is for `end`."""
        if self._is_inside:  # it counts as part of that
            return None
        self._schedule()
        self._is_inside = True
        return self._clock()

    def end(self, began: float | None) -> float:
        """Work that has begun ends; gives the seconds that it counts for."""
        if began is None:
            return 0.0
        self._is_inside = False
        took_s, self._weight = (self._clock() - began) * self._weight, 1.0
        self._spent_s += took_s
        return took_s

    def weigh(self, weight: float) -> None:
        """The work that is done now counts as so many times its length, for what follows from it uncounted."""
        self._weight = weight

    def part(self, step: Callable[[], bool]) -> bool:
        """Takes one step after the other for a part of a turn.

        Args:
            step: Says whether there is more to be done.

        Returns:
            Whether all is done.
        """
        end = self._clock() + PART * self._budget_s
        with self.counted():
            while step():
                if self._clock() >= end:
                    return False
        return True

    def charge(self, expected_s: float) -> None:
        """What follows from the work that is done now, uncounted, takes so long."""
        self._spent_s += expected_s

    def learn(self, took_s: float) -> None:
        """A step that had waited took so long; those after it are expected to."""
        self._step_s = max(took_s, self._step_s + FORGETS * (took_s - self._step_s))

    def paced(self, app: ASGIApp, address: str) -> ASGIApp:
        """The application, each of whose steps waits for its turn."""

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            await _Paced(app(scope, receive, send), self, address)

        return run

    def _release(self, waiter: asyncio.Future[None], expected_s: float | None) -> None:
        if not waiter.done():
            self._num_released += 1
            self._spent_s += self._step_s if expected_s is None else expected_s  # it goes on after this turn's work
            waiter.set_result(None)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._is_scheduled = False
        self._spent_s, self._num_released, self._num_rides = 0.0, 0, 0
        while self._num_waiting and self._spent_s < self._budget_s and self._num_released < RELEASED_AT_ONCE:
            try:
                with self.counted():
                    self._take()()
            except Exception as error:  # noqa: BLE001  whose work it was is no matter of those who wait
                self._loop.call_exception_handler({"message": "work of a connection failed", "exception": error})
        if self._num_waiting:
            self._schedule()
        else:
            self._old.clear()

    def _take(self) -> Callable[[], None]:
        """What is to be done next; its address goes behind the others."""
        while True:
            is_new = bool(self._new) and (self._num_new_in_a_row < NEW_IN_A_ROW or not self._old)
            address, queue = (self._new if is_new else self._old).popitem(last=False)
            if queue:
                self._num_new_in_a_row = self._num_new_in_a_row + 1 if is_new else 0
                self._num_waiting -= 1
                self._old[address] = queue
                return queue.popleft()


class _Paced:
    """Awaits a coroutine, each step of it in its turn."""

    def __init__(self, coroutine: Awaitable[None], turns: Turns, address: str) -> None:
        self._coroutine = coroutine.__await__()
        self._turns = turns
        self._address = address

    def __await__(self) -> Generator[Any, Any, None]:
        error: BaseException | None = None
        while True:
            waits = not (self._turns.has_time or isinstance(error, GeneratorExit))
            if waits:
                try:
                    yield from self._turns.wait(self._address).__await__()
                except BaseException as raised:  # noqa: BLE001  it is for the coroutine to deal with
                    error = raised
            began = self._turns.begin()
            try:
                awaited = next(self._coroutine) if error is None else self._coroutine.throw(error)
            except StopIteration:
                return
            finally:
                error = None  # its traceback refers to this frame
                took_s = self._turns.end(began)
                if waits:
                    self._turns.learn(took_s)
            try:
                yield awaited
            except BaseException as raised:  # noqa: BLE001
                error = raised
            finally:
                awaited = None  # it may refer to an error whose traceback comes to refer to this frame
