"""All waiting requests: which class is next, and who within it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain

from llm_serving.core.request import Request
from llm_serving.core.request_class import RequestClass
from llm_serving.scheduler.class_queue import ClassQueue
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.orders import Order
from llm_serving.scheduler.turns import Turns


class WaitingQueue:
    """Higher classes first, but none starves: a class whose oldest request has waited `ageing_steps` takes turns with
    the higher ones by weight. An ageing that only adds to a priority would end in first come, first served as soon as
    the backlog is older than the ageing; shares stay shares.

    Each class has a clock, which counts the steps it could take part in. Waits are read off it.
    """

    def __init__(self, classes: Sequence[RequestClass], limits: SchedulerLimits, order: Order, num_blocks: int) -> None:
        """Classes in ascending order of rank; `num_blocks` of the cache."""
        self.queues = {each.name: ClassQueue(each, limits.max_overtakes, order) for each in classes}
        self.turns = Turns(classes, limits, num_blocks)
        self.clocks = dict.fromkeys(self.queues, 0)

    def __len__(self) -> int:
        return sum(map(len, self.queues.values()))

    def __iter__(self) -> Iterator[Request]:
        """All members, in no particular order."""
        return chain.from_iterable(self.queues.values())

    def push(self, request: Request) -> None:
        self.queues[request.request_class.name].push(request)

    def discard(self, request: Request) -> None:
        self.queues[request.request_class.name].discard(request)

    def look(self, closed: Collection[str], held: Mapping[str, int], late: Collection[str] = ()) -> list[str]:
        """Notes who contends; to be called before questions, whenever somebody came or went.

        Args:
            closed: Classes that are passed over.
            held: Places of each class.
            late: Classes with a prompt that has had a place for `ageing_steps` and is not computed.

        Returns:
            Those with somebody who waits and may be admitted.
        """
        waiting, aged = [], [*late]
        for name, queue in self.queues.items():
            if len(queue) and name not in closed and (arrival := queue.arrival_clock()) is not None:
                waiting.append(name)
                if self.clocks[name] - arrival >= queue.request_class.ageing_steps:
                    aged.append(name)
        self.turns.look(waiting, aged, held)
        return waiting

    def best(self, closed: Collection[str], held: Mapping[str, int], blocks: Mapping[str, int]) -> Request | None:
        """Who is to be admitted next; it stays. Classes hold so many places and blocks."""
        name = self.turns.next(self.look(closed, held), held, blocks)
        return None if name is None else self.queues[name].head()

    def pop(self, request: Request) -> None:
        """Takes out what `best` returned: it is admitted."""
        self.queues[request.request_class.name].pop(request)

    def tick(self, closed: Collection[str]) -> None:
        """A step has been formed; classes in `closed` could not take part in it."""
        for name in self.clocks:
            if name not in closed:
                self.clocks[name] += 1
