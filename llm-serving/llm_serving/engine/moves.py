"""Requests that begin at one replica and go on at another: how an engine takes them, and how it lets go of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from llm_serving.core.request import Request
from llm_serving.core.request_class import class_of
from llm_serving.core.transfer import Transfer
from llm_serving.engine.audit import Auditor
from llm_serving.engine.departure import Departure, as_it_goes_on
from llm_serving.engine.output_processor import OutputProcessor
from llm_serving.engine.receivers import Desk, OneSequence
from llm_serving.kvcache.exports import TransferBlock
from llm_serving.observe.journal import Journal
from llm_serving.observe.metrics import Metrics
from llm_serving.scheduler import Schedule, Scheduler


class Moves:
    """What one engine has to do with other replicas' requests and blocks; belongs to the engine's thread.

    A request departs when the step that hands its blocks over is replied to, and after all that its client was told
    here. Where it goes on, its blocks are brought in with its first step, and given back when that step is done.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        processor: OutputProcessor,
        auditor: Auditor,
        desk: Desk,
        journal: Journal,
        metrics: Metrics,
    ) -> None:
        self.on_departures: Callable[[list[Departure]], None] = lambda departures: None
        """Told of requests that another replica is to go on with, after all that was told of them here."""
        self.on_spent: Callable[[list[TransferBlock]], None] = lambda blocks: None
        """Told of blocks of others that are not needed any more."""
        self._scheduler = scheduler
        self._processor = processor
        self._auditor = auditor
        self._desk = desk
        self._journal = journal
        self._metrics = metrics
        self._spent: deque[list[TransferBlock]] = deque()
        """For each step in flight, what nobody needs any more when it is done."""
        self._departing: list[tuple[Request, Transfer, float]] = []
        """Whom the scheduler has let go of, with what, and when."""
        self._arrived: dict[Request, float] = {}
        """Requests of other replicas that no step has been formed with, and when these let go of them."""

    def arrive(self, departure: Departure) -> None:
        """Goes on with a request that another replica has begun."""
        request = departure.request
        if departure.brought is not None and departure.brought.link.is_closed:
            self.on_spent(departure.leave_blocks())
        self._auditor.resume(request, departure.audited)
        self._processor.resume(request, departure.produced)
        self._journal.arrived(request, class_of(request.priority, self._scheduler.classes), departure.time)
        receiver = request.receiver = OneSequence(request, self._desk)
        receiver.resume()
        self._arrived[request] = departure.time

    def formed(self, schedule: Schedule | None) -> None:
        """The next step was decided; None: there is nothing to compute."""
        if schedule is not None:
            self._spent.append([])
        if spent := self._scheduler.blocks.take_spent():
            self._spend(spent)

    def submitted(self, schedule: Schedule, now: float) -> None:
        """The WorkAgent was told of a step, which was formed at `now`."""
        if not self._arrived:
            return
        seconds = [now - self._arrived.pop(row.request) for row in schedule.rows if row.request in self._arrived]
        if seconds:
            self._metrics.moves.arrived(seconds, schedule.block_moves)
        self._arrived = {request: time for request, time in self._arrived.items() if not request.is_finished}

    def step_done(self) -> None:
        """The oldest step in flight was replied to: what was read for it may be written over."""
        if spent := self._spent.popleft():
            self.on_spent(spent)

    def delivered(self, schedule: Schedule, now: float) -> None:
        """The results of a step are on their way to the clients: whose blocks it handed over is let go of."""
        for row in schedule.departures:
            if row.request.departs and not row.request.is_finished:
                self._departing.append((row.request, self._scheduler.depart(row.request), now))

    def published(self) -> None:
        """The clients were told all that was to be told of those who depart."""
        if not self._departing:
            return
        departures = []
        for request, transfer, time in self._departing:
            if not self._processor.knows(request):  # it has ended since
                self._scheduler.give_back(transfer.blocks)
                continue
            produced, audited = self._processor.leave(request), self._auditor.leave(request.request_id)
            request.receiver = None
            self._journal.departed(request, time)
            departures.append(Departure(as_it_goes_on(request, transfer), produced, audited, time))
        self._departing = []
        if departures:
            self.on_departures(departures)

    def lost(self) -> None:
        """No step is in flight any more: what was is done, or its WorkAgent is gone."""
        while self._spent:
            self.on_spent(self._spent.popleft())

    def end(self) -> None:
        """No step will be formed any more."""
        self._spend(self._scheduler.blocks.take_spent())
        self.lost()

    def _spend(self, blocks: list[TransferBlock]) -> None:
        """Nobody needs these blocks any more when the steps in flight are done."""
        if self._spent:
            self._spent[-1] += blocks
        else:
            self.on_spent(blocks)
