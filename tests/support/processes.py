"""Runs tests in several processes, forked after all tests were collected, so that no process imports them again.

Each process takes one unit of tests after the other, in order, and reports every test to the main process. A unit is a
file, or a folder whose files share a fixture that takes long. A test that takes longer than `TIME_LIMIT` ends its
process. The failure of such a test, or of one that crashes its process, shows what each thread executed.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import mmap
import os
import selectors
import struct
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from pathlib import Path
from typing import IO, Any, Final, NoReturn

import pytest

NUMBER = struct.Struct("=i")
"""Format of the number of a test. The pipe of these numbers must hold one for each unit."""

SHARED_FOLDERS: Final = ("ascend",)
"""Folders that are units."""

TIME_LIMIT: Final = 300.0
"""Seconds for a test with its fixtures: ten times the slowest one. Only a test that waits forever exceeds it."""


def unit_of(item: pytest.Item) -> Path:
    return item.path.parent if item.path.parent.name in SHARED_FOLDERS else item.path


def run_in_processes(session: pytest.Session, num_processes: int) -> None:
    """Run the collected tests in processes; report them as if they had run in this one.

    Raises:
        pytest.Session.Failed: The maximum number of failures was reached.
    """
    session.config._tmp_path_factory.getbasetemp()  # create the folder that all processes share
    queue, into_queue = os.pipe()
    units = groupby(range(len(session.items)), key=lambda number: unit_of(session.items[number]))
    os.write(into_queue, b"".join(NUMBER.pack(next(numbers)) for _, numbers in units))
    os.close(into_queue)
    processes: list[_Process] = []
    try:
        for report in _reports(session, queue, processes, num_processes):
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
    """A process that runs tests, as the main process sees it."""

    def __init__(self, session: pytest.Session, queue: int, others: Sequence[_Process]) -> None:
        self.running = mmap.mmap(-1, NUMBER.size)
        """Number of the test that it runs; -1 after the last one."""
        self.stacks = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the process runs
        """What each thread executed when a test crashed the process or exceeded its time limit."""
        self.reports_fd, send_fd = os.pipe()
        self._exit_code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            for each in (self, *others):  # close the read ends: a pipe breaks only if the main process has ended
                os.close(each.reports_fd)
            _run(session, queue, send_fd, self.running, self.stacks)
        os.close(send_fd)
        self.text = b""

    def end(self) -> None:
        """Wait for the process; if it still runs, its next report meets a broken pipe."""
        os.close(self.reports_fd)
        self._wait()
        self.stacks.close()

    def failure(self, items: Sequence[pytest.Item]) -> pytest.TestReport | None:
        """Wait for the process, which sends no more reports; return a failure if a test has ended it."""
        exit_code = self._wait()
        (number,) = NUMBER.unpack(self.running)
        if number < 0:
            return None
        how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        text = f"the process that ran this test has ended ({how}); later tests of its unit were not run"
        self.stacks.seek(0)
        sections = [("what its threads executed", self.stacks.read().decode(errors="replace"))]
        item = items[number]
        return pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call", sections)

    def _wait(self) -> int:
        """Wait for the process; return its exit code, or the negative number of the signal that ended it."""
        if self._exit_code is None:
            self._exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._exit_code


def _reports(
    session: pytest.Session, queue: int, processes: list[_Process], num_processes: int
) -> Iterator[pytest.TestReport]:
    """Start the processes; yield the reports of all until all have ended. If a test ends its process, yield a failure
    and start another process for the remaining units.
    """
    with selectors.DefaultSelector() as selector:

        def start() -> None:
            process = _Process(session, queue, [key.data for key in selector.get_map().values()])
            processes.append(process)
            selector.register(process.reports_fd, selectors.EVENT_READ, process)

        for _ in range(num_processes):
            start()
        while selector.get_map():
            for key, _ in selector.select():
                process: _Process = key.data
                text = os.read(process.reports_fd, 2**16)
                *lines, process.text = (process.text + text).split(b"\n")
                yield from (_deserialized(session.config, line) for line in lines)
                if not text:
                    selector.unregister(process.reports_fd)
                    if failure := process.failure(session.items):
                        yield failure
                        start()


def _deserialized(config: pytest.Config, line: bytes) -> pytest.TestReport:
    data = json.loads(line)
    if isinstance(data["longrepr"], list):  # the test was skipped
        data["longrepr"] = tuple(data["longrepr"])
    report: pytest.TestReport = config.hook.pytest_report_from_serializable(config=config, data=data)
    return report


# --- in a process that runs tests -------------------------------------------------------------------------------------


def _run(session: pytest.Session, queue: int, send_fd: int, running: mmap.mmap, stacks: IO[bytes]) -> NoReturn:
    """Run units until the queue is empty."""
    try:
        faulthandler.enable(stacks)
        plugins = session.config.pluginmanager
        plugins.unregister(name="terminalreporter")
        capture: Any = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()  # all processes would share its files
        capture.start_global_capturing()
        capture.suspend_global_capture()
        plugins.register(_ReportSender(session.config, send_fd))
        while number := os.read(queue, NUMBER.size):
            _run_unit(session, *NUMBER.unpack(number), running, stacks)
        faulthandler.cancel_dump_traceback_later()
        NUMBER.pack_into(running, 0, -1)
    except BaseException:  # noqa: BLE001  the main process reports the lost test
        traceback.print_exc()
    finally:
        session._setupstate.teardown_exact(None)
        os._exit(0)


def _run_unit(session: pytest.Session, first: int, running: mmap.mmap, stacks: IO[bytes]) -> None:
    unit = unit_of(session.items[first])
    tests = list(takewhile(lambda item: unit_of(item) == unit, session.items[first:]))
    if any(item.get_closest_marker("mindspore") for item in tests):
        # MindSpore collects garbage for every graph it compiles; it should not walk over what earlier files have left.
        gc.collect()
        gc.freeze()
    for number, (item, following) in enumerate(zip(tests, [*tests[1:], None], strict=True), start=first):
        NUMBER.pack_into(running, 0, number)
        faulthandler.dump_traceback_later(TIME_LIMIT, exit=True, file=stacks)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


class _ReportSender:
    def __init__(self, config: pytest.Config, send_fd: int) -> None:
        self._config = config
        self._send_fd = send_fd

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            return  # the terminal reporter does not use it
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        text = json.dumps(data, default=str).encode() + b"\n"
        while text:
            text = text[os.write(self._send_fd, text) :]
