"""Logging to standard error, and rotating log files written by a background thread."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import re
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from sys import getsizeof
from typing import Final

ROOT: Final = "llm_serving"
LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")
_CONTROL_CHARACTERS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


BATCH_S: Final = 0.1
"""Seconds for which lines are collected before they are written."""
BATCH_CHARS: Final = 2**16
"""Maximum number of characters in one write, unless a single line is longer."""
MAX_PENDING_BYTES: Final = 16 * 2**20
"""Maximum bytes of lines that wait to be written. Further lines are dropped."""
RETRY_S: Final = 1.0
CLOSE_S: Final = 5.0


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name if name.startswith(ROOT) else f"{ROOT}.{name}")


logged_model: ContextVar[str] = ContextVar("logged_model", default="")
"""Model that the log lines of this thread and request are about. Empty if the server has only one model."""


class SingleLineFormatter(logging.Formatter):
    """Escapes control characters, so that client texts cannot forge log lines. Tracebacks are not changed."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        if name := logged_model.get():
            record.message = f"{name}: {record.message}"
        return _CONTROL_CHARACTERS.sub(lambda found: repr(found[0])[1:-1], super().formatMessage(record))


def configure_logging(level: str = "INFO", process: str = "master") -> None:
    """Send the package's log lines to standard error, with the process's name. A later call replaces this one."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(SingleLineFormatter(f"%(asctime)s %(levelname)-7s [{process}] %(name)s: %(message)s"))
    logger = logging.getLogger(ROOT)
    for old in logger.handlers[:]:
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


class RotatingFile(logging.handlers.RotatingFileHandler):
    """At most `num_files` log files of `max_bytes`, the latest in `path`. It raises OSError instead of printing it."""

    def __init__(self, path: Path, max_bytes: int, num_files: int) -> None:
        super().__init__(path, maxBytes=max_bytes, backupCount=num_files - 1, encoding="utf-8", errors="replace")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        raise  # it is called while the error is handled


class LogWriter:
    """Writes lines through a handler in a background thread, so that callers never wait for the disk. Thread-safe.

    Writes to a full disk are retried; lines beyond `MAX_PENDING_BYTES` are dropped and counted. `report` is called once
    when a problem begins and once when it ends. The writer owns the handler. The handler's `emit` writes a text of one
    or more lines, or raises an error.
    """

    def __init__(self, handler: logging.Handler, report: Callable[[str], None]) -> None:
        self._handler = handler
        self._report = report
        self._pending: deque[str] = deque()
        self._num_bytes = 0
        self._num_lost = 0
        self._fails = False
        self._is_reported = False
        self._is_stale = False
        self._lock = threading.Lock()
        self._filled = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        with self._lock:
            size = getsizeof(line)
            if self._num_bytes + size > MAX_PENDING_BYTES:
                self._num_lost += 1
                return
            self._pending.append(line)
            self._num_bytes += size
        if not self._filled.is_set():
            self._filled.set()

    def reopen(self) -> None:
        """Reopen the file before the next write. Call this after the file was renamed or deleted."""
        self._is_stale = True

    def close(self) -> None:
        """Write the queued lines within `CLOSE_S`, then stop the writer."""
        self._closing.set()
        self._filled.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while True:
            self._filled.wait()
            self._closing.wait(BATCH_S)
            self._filled.clear()
            while lines := self._next_batch():
                self._write(lines)
            if self._closing.is_set() and not self._pending:
                break
        with contextlib.suppress(OSError):
            self._handler.close()

    def _next_batch(self) -> list[str]:
        lines: list[str] = []
        num_chars = 0
        with self._lock:
            while self._pending and num_chars < BATCH_CHARS:
                lines.append(self._pending.popleft())
                num_chars += len(lines[-1]) + 1
                self._num_bytes -= getsizeof(lines[-1])
        return lines

    def _write(self, lines: list[str]) -> None:
        if self._fails:
            self._closing.wait(RETRY_S)
        record = logging.makeLogRecord({"msg": "\n".join(lines)})
        try:
            if self._is_stale:
                self._is_stale = False
                self._handler.close()  # `emit` opens it again
            self._handler.emit(record)
        except Exception as error:  # noqa: BLE001  no error may stop the writer
            with self._lock:
                self._num_lost += len(lines)
            self._fails = True
            self._report_once(f"cannot be written, lines are dropped until it can: {error}")
            return
        self._fails = False
        if self._num_lost == 0:
            return
        self._report_once("is written too slowly, lines are dropped")
        if not self._pending:
            with self._lock:
                num_lost, self._num_lost = self._num_lost, 0
            self._is_reported = False
            self._report(f"is written again; {num_lost} lines were lost")

    def _report_once(self, text: str) -> None:
        if not self._is_reported:
            self._is_reported = True
            self._report(text)
