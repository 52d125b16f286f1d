"""Ends requests whose time is over, and those whose first token would come only after it."""

from __future__ import annotations

from typing import Final

from llm_serving.admission.load_estimator import LoadEstimator, Queue
from llm_serving.core.request import FinishReason, Request
from llm_serving.engine.deadlines import Deadlines, timeout_of
from llm_serving.engine.delivery import end
from llm_serving.scheduler import Scheduler

LOOK_EVERY_S: Final = 0.1
"""How often waiting requests are looked at whose deadline may have become too early."""
MAX_LOOKED_AT: Final = 16
"""At a time; those with the earliest deadlines."""


class Overdue:
    """Looks at the requests of one scheduler; times are on the clock of the engine.

    Args:
        deadlines: Of all requests that have one.
        scheduler: That computes them.
    """

    def __init__(self, deadlines: Deadlines, scheduler: Scheduler) -> None:
        self._deadlines = deadlines
        self._scheduler = scheduler
        self._look_again = 0.0
        """When deadlines that cannot be met are looked for again."""

    def is_due(self, now: float) -> bool:
        """Whether `end` may end somebody."""
        deadline = self._deadlines.next
        return deadline is not None and (now >= deadline or now >= self._look_again)

    def end(self, now: float, load: LoadEstimator, step_began: float) -> None:
        """Ends whoever is too late, wherever it is.

        Args:
            now: The time.
            load: Tells when a first token is to be expected.
            step_began: When the oldest step in flight did.
        """
        for request in self._deadlines.take_passed(now):
            end(request, FinishReason.TIMEOUT, f"the request was not done within its {timeout_of(request):g} s")
        if now >= self._look_again:
            self._look_again = now + LOOK_EVERY_S
            self._end_hopeless(now, load, now - step_began)

    def _end_hopeless(self, now: float, load: LoadEstimator, elapsed_s: float) -> None:
        """Ends requests that could not have a first token before their deadline even if they were next.

        Where nothing runs they begin at once, and show whether what was measured still holds.
        """
        measured, scheduler = load.measured, self._scheduler
        if measured is None or not scheduler.running:
            return
        num_running = len(scheduler.running)
        for request in self._deadlines.not_begun(MAX_LOOKED_AT):
            first = _first_computed(request)
            if first is None or request.deadline is None:
                continue
            rank = first.request_class.rank
            num_before = sum(scheduler.held[each.name] for each in scheduler.classes if each.rank <= rank)
            queue = Queue(
                1,
                scheduler.num_owed_tokens(first),
                num_before,
                num_running,
                under_way=load.under_way,
                elapsed_s=elapsed_s,
            )
            seconds = measured.seconds_to_first_token(queue)
            if seconds is not None and now + seconds > request.deadline:
                timeout = f"the request cannot be done within its {timeout_of(request):g} s"
                end(request, FinishReason.TIMEOUT, f"{timeout}: its first token is expected in {seconds:.2f} s")


def _first_computed(request: Request) -> Request | None:
    """What waits first of all that is computed for a request; None: something of it has been computed."""
    if request.receiver is None:
        return None
    computed = request.receiver.computed
    return computed[0] if all(each.first_scheduled_time is None for each in computed) and computed else None
