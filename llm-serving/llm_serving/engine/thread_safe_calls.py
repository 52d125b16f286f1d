"""What other threads ask of an engine: each call posts a message that the engine's thread handles between two steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from llm_serving.core.request import Request
from llm_serving.core.request_class import class_of
from llm_serving.engine.fleet.migration import MigratingRequest
from llm_serving.engine.inbox import Inbox
from llm_serving.engine.listener import EngineListener
from llm_serving.errors import WorkerDiedError
from llm_serving.executor.cluster.block_link import BlockLink
from llm_serving.executor.executor import Executor
from llm_serving.executor.restart_status import RestartStatus
from llm_serving.kvcache.transfer_pool import TransferBlock
from llm_serving.observability.event_log import EventLog
from llm_serving.scheduler import Scheduler

T = TypeVar("T")


class ThreadSafeCalls:
    """The part of an engine that any thread may call.

    Args:
        scheduler: Of the engine.
        executor: Its way to the WorkAgent.
        journal: Its event log.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, journal: EventLog) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self.journal = journal
        self._inbox = Inbox()
        self._inbox.on_end = self._report_closing
        self._listeners: list[EngineListener] = []
        self._stopping = False

    def add_listener(self, listener: EngineListener) -> None:
        """Report further events to this listener too. Call it before the engine serves."""
        self._listeners.append(listener)

    def submit(self, request: Request) -> None:
        """Queue a request that passed admission control.

        Raises:
            WorkerDiedError: The engine has ended, or is about to.
        """
        self._check_open()
        self.journal.submitted(request, class_of(request.priority, self.scheduler.classes))
        try:
            self._inbox.post(lambda: self._add(request))
        except WorkerDiedError:
            self.journal.forget(request)
            raise

    def abort(self, request_id: str) -> None:
        """End a request before the next step; a finished one stays as it is."""
        with contextlib.suppress(WorkerDiedError):  # then it has ended with everything else
            self._inbox.post(lambda: self._abort(request_id))

    def take_over(self, migrating: MigratingRequest, *, is_cancelled: bool = False) -> None:
        """Continue a request that another replica has begun; end it if it was cancelled during the transfer.

        Raises:
            WorkerDiedError: The engine has ended, or is about to.
        """
        self._check_open()
        self._inbox.post(lambda: self._arrive(migrating, is_cancelled))

    def reclaim_blocks(self, blocks: list[TransferBlock]) -> None:
        """Free exported blocks that the importing replicas have read."""
        with contextlib.suppress(WorkerDiedError):  # the next owner of the memory starts without exports
            self._inbox.post(lambda: self.scheduler.reclaim_exported_blocks(blocks))

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """Call a function in the engine's thread between two steps, and return its result or exception.

        Raises:
            WorkerDiedError: The engine has ended.
        """
        answer: Future[T] = Future()

        def reply() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(question())
                except Exception as error:  # noqa: BLE001  the caller gets it
                    answer.set_exception(error)

        self._inbox.post(reply)
        return answer

    def wake(self) -> None:
        """Wake the engine, so that it looks at what replicas share."""
        with contextlib.suppress(WorkerDiedError):
            self._inbox.post(lambda: None)
        for listener in self._listeners:
            listener.on_woken()

    def stop(self) -> None:
        """End the loop after the steps in flight; unfinished requests end with an error."""
        self._stopping = True
        self._report_closing()
        self._inbox.wake()
        self._executor.cancel_restarts()

    def replace_inbox(self, inbox: Inbox) -> None:
        """Use another inbox, before the first message."""
        self._inbox.close("another inbox replaces this one")
        self._inbox, inbox.on_end = inbox, self._report_closing

    def close(self) -> None:
        """Close the file descriptor of the inbox; the engine makes no further step."""
        self._inbox.close("the engine is closed")

    @property
    def dead(self) -> str | None:
        """Why the engine ended, once it has."""
        return self._inbox.ended

    @property
    def is_stopping(self) -> bool:
        """Whether it has been told to end: a request submitted now would end with it."""
        return self._stopping

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Waiting requests, those in the inbox included."""
        return self.scheduler.num_waiting + len(self._inbox)

    @property
    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests or bool(self._inbox)

    @property
    def restart_status(self) -> RestartStatus | None:
        """What is known of the WorkAgent while it is restarted."""
        return self._executor.restart_status

    @property
    def restarts_exhausted(self) -> bool:
        """Whether the WorkAgent was restarted more often in a row than is allowed."""
        return self._executor.restarts_exhausted

    @property
    def machine(self) -> str:
        """Address of the WorkAgent's machine; empty: the master's own."""
        return self._executor.machine

    @property
    def block_link(self) -> BlockLink | None:
        """Transfers KV blocks from and to the WorkAgent; None: it shares memory with the others."""
        return self._executor.block_link

    def _check_open(self) -> None:
        if self._stopping:
            raise WorkerDiedError("the engine is about to end")

    def _report_closing(self) -> None:
        for listener in self._listeners:
            listener.on_closing()

    # --- in the engine's thread -------------------------------------------------------------------------------------

    def _add(self, request: Request) -> None:
        raise NotImplementedError

    def _arrive(self, migrating: MigratingRequest, is_cancelled: bool) -> None:
        raise NotImplementedError

    def _abort(self, request_id: str) -> None:
        raise NotImplementedError
