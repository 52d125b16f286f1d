"""Threads that are shared fairly between sources."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial

import pytest
from llm_serving.server.parsing.offload import FairThreads


class Work:
    """Jobs on one thread with given durations on a clock; none starts before `gate` is open."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done: list[str] = []
        self.gate = threading.Event()
        self.threads = FairThreads(1, "test", lambda: self.now)
        self._futures = [self.threads.submit("", self.gate.wait)]

    def ask(self, owner: str, seconds: float = 1.0) -> Future[str]:
        self._futures.append(self.threads.submit(owner, partial(self._do, owner, seconds)))
        return self._futures[-1]

    def _do(self, owner: str, seconds: float) -> str:
        self.now += seconds
        self.done.append(owner)
        return owner

    def finish(self) -> list[str]:
        self.gate.set()
        for future in self._futures:
            if not future.cancelled():
                future.exception()
        return self.done


def test_fair_threads_serve_sources_in_turn() -> None:
    work = Work()
    for _ in range(50):
        work.ask("a")
        work.ask("b")
    work.ask("new")
    assert work.finish().index("new") == 2


def test_fair_threads_share_time_not_jobs() -> None:
    work = Work()
    for _ in range(20):
        work.ask("long", 2.0)
        work.ask("short", 0.5)
    done = work.finish()
    assert done[: done.index("short")] in ([], ["long"])
    assert done[:11].count("short") == 8, "while the other has had two or three pieces"


def test_fair_threads_give_no_credit_for_idle_time() -> None:
    work = Work()
    for _ in range(10):
        work.ask("a")
    waits = work.ask("a")
    work.gate.set()
    waits.result()
    gate = threading.Event()
    work.threads.submit("", gate.wait)
    for _ in range(6):
        work.ask("a")
        work.ask("b")
    gate.set()
    assert work.finish()[11:15].count("b") in (2, 3)


def test_fair_threads_skip_cancelled_jobs() -> None:
    work = Work()
    first, second = work.ask("a"), work.ask("a")
    assert first.cancel()
    work.finish()
    assert (work.done, second.result()) == (["a"], "a")


def test_fair_threads_continue_after_an_exception() -> None:
    work = Work()
    failed = work.threads.submit("a", lambda: 1 / 0)
    after = work.ask("a")
    work.finish()
    assert after.result() == "a"
    with pytest.raises(ZeroDivisionError):
        failed.result()


def test_fair_threads_drop_idle_sources() -> None:
    work = Work()
    for number in range(100):
        work.ask(str(number), 0.1)
    work.finish()
    for _ in range(5):
        work.ask("last", 1.0).result()
    assert set(work.threads._used_s) <= {"last"}
