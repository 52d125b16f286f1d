"""Tests in several processes that are forked once all are collected: what is imported and found is there in each.

A process takes one file after the other, in their order, and tells the first process of every test.
"""

from __future__ import annotations

import json
import mmap
import os
import selectors
import struct
import traceback
from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from typing import Any, NoReturn

import pytest

NUMBER = struct.Struct("=i")
"""Of a test; there are fewer files than a pipe has room for."""


def run_in_processes(session: pytest.Session, num_processes: int) -> None:
    """Runs the tests that were collected; reports them as if they had run here.

    Raises:
        pytest.Session.Failed: So many have failed that no more are to run.
    """
    session.config._tmp_path_factory.getbasetemp()  # one folder for all
    queue, into_queue = os.pipe()
    files = groupby(range(len(session.items)), key=lambda number: session.items[number].path)
    os.write(into_queue, b"".join(NUMBER.pack(next(numbers)) for _, numbers in files))
    os.close(into_queue)
    processes: list[_Process] = []
    try:
        while len(processes) < num_processes:
            processes.append(_Process(session, queue, processes))
        for report in _reports(session, processes):
            session.config.hook.pytest_runtest_logreport(report=report)
            if report.when != "setup":
                session.config.hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
    finally:
        os.close(queue)
        for each in processes:
            each.end()


class _Process:
    """One that runs tests, as the first process knows it."""

    def __init__(self, session: pytest.Session, queue: int, others: Sequence[_Process]) -> None:
        self.running = mmap.mmap(-1, NUMBER.size)
        """Number of its test."""
        self.told, tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for each in (self, *others):  # otherwise nobody would notice that the first process is gone
                os.close(each.told)
            _run(session, queue, tell, self.running)
        os.close(tell)
        self.text = b""

    def end(self) -> None:
        """It meets a broken pipe if it has not ended."""
        os.close(self.told)
        os.waitpid(self.pid, 0)


def _reports(session: pytest.Session, processes: Sequence[_Process]) -> Iterator[pytest.TestReport]:
    """What they tell until all have ended, and of each that was lost its last test."""
    with selectors.DefaultSelector() as selector:
        for each in processes:
            selector.register(each.told, selectors.EVENT_READ, each)
        while selector.get_map():
            for key, _ in selector.select():
                process: _Process = key.data
                text = os.read(process.told, 2**16)
                *lines, process.text = (process.text + text).split(b"\n")
                yield from (_told(session.config, line) for line in lines)
                if not text:
                    selector.unregister(process.told)
                    (number,) = NUMBER.unpack(process.running)
                    if number >= 0:
                        yield _lost(session.items[number])


def _told(config: pytest.Config, line: bytes) -> pytest.TestReport:
    data = json.loads(line)
    if isinstance(data["longrepr"], list):  # where a test was left out
        data["longrepr"] = tuple(data["longrepr"])
    report: pytest.TestReport = config.hook.pytest_report_from_serializable(config=config, data=data)
    return report


def _lost(item: pytest.Item) -> pytest.TestReport:
    text = "the process that ran this test has ended; the tests behind it in this file were not run"
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")


# --- in a process that runs tests -------------------------------------------------------------------------------------


def _run(session: pytest.Session, queue: int, tell: int, running: mmap.mmap) -> NoReturn:
    """Runs files until there are no more."""
    try:
        plugins = session.config.pluginmanager
        plugins.unregister(name="terminalreporter")
        capture: Any = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()  # into files that all would share
        capture.start_global_capturing()
        capture.suspend_global_capture()
        plugins.register(_Teller(session.config, tell))
        while number := os.read(queue, NUMBER.size):
            _run_file(session, *NUMBER.unpack(number), running)
        NUMBER.pack_into(running, 0, -1)
    except BaseException:  # noqa: BLE001  the first process notices
        traceback.print_exc()
    finally:
        session._setupstate.teardown_exact(None)
        os._exit(0)


def _run_file(session: pytest.Session, first: int, running: mmap.mmap) -> None:
    path = session.items[first].path
    tests = list(takewhile(lambda item: item.path == path, session.items[first:]))
    for number, (item, following) in enumerate(zip(tests, [*tests[1:], None], strict=True), start=first):
        NUMBER.pack_into(running, 0, number)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


class _Teller:
    def __init__(self, config: pytest.Config, tell: int) -> None:
        self._config = config
        self._tell = tell

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            return  # nobody asks
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        text = json.dumps(data, default=str).encode() + b"\n"
        while text:
            text = text[os.write(self._tell, text) :]
