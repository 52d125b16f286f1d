"""All waiting requests: which class is next, and who within it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from llm_serving.core.request import Request
from llm_serving.core.request_class import RequestClass
from llm_serving.scheduler.class_queue import ClassQueue


class WaitingQueue:
    """Higher classes first, but none starves.

    A class whose first request has waited `ageing_steps` shares with the highest class that waits: they are admitted in
    proportion to their weights (stride scheduling, Waldspurger and Weihl 1995). An ageing that only adds to a priority
    would end in first come, first served as soon as the backlog is older than the ageing; shares stay shares.
    """

    def __init__(self, classes: Sequence[RequestClass], max_overtakes: int) -> None:
        """Classes in ascending order of rank; overtaking as in `ClassQueue`."""
        self.queues = {each.name: ClassQueue(each, max_overtakes) for each in classes}
        scale = math.lcm(*(each.weight for each in classes))
        self._strides = {each.name: scale // each.weight for each in classes}
        self._passes = dict.fromkeys(self.queues, 0)
        """How far each class has come, in strides; the least is next."""

    def __len__(self) -> int:
        return sum(map(len, self.queues.values()))

    def __iter__(self) -> Iterator[Request]:
        """All members, in no particular order."""
        for queue in self.queues.values():
            yield from queue

    def push(self, request: Request, step: int) -> None:
        """The request waits from before step `step` on."""
        request.waiting_since_step = step
        self.queues[request.request_class.name].push(request)

    def discard(self, request: Request) -> None:
        self.queues[request.request_class.name].discard(request)

    def best(self, step: int, closed: Collection[str]) -> Request | None:
        """Who is to be admitted next at `step`; it stays. Classes in `closed` are passed over."""
        contenders = self._contenders(step, closed)
        if not contenders:
            return None
        name = min(contenders, key=lambda each: self._passes[each])  # of equals the highest class
        return self.queues[name].head()

    def pop(self, request: Request, step: int, closed: Collection[str]) -> bool:
        """Takes out what `best` returned: it is admitted, and its class has had its turn.

        Returns:
            Whether it went before a higher class that waits.
        """
        name = request.request_class.name
        contenders = self._contenders(step, closed)
        self._passes[name] += self._strides[name]
        # Who does not contend has no turns to save up.
        least = min(self._passes[each] for each in contenders)
        for each in self.queues:
            if each not in contenders:
                self._passes[each] = max(self._passes[each], least)
        self.queues[name].pop(request)
        return name != contenders[0]

    def _contenders(self, step: int, closed: Collection[str]) -> list[str]:
        """The highest class that waits and those below it that have aged."""
        contenders: list[str] = []
        for name, queue in self.queues.items():
            if name in closed or (oldest := queue.oldest()) is None:
                continue
            if not contenders or step - oldest.waiting_since_step >= queue.request_class.ageing_steps:
                contenders.append(name)
        return contenders
