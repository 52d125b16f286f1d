"""Logging of both programs: one line an event, to standard error, named by process and module.

Lines to a rotating file, written by a thread of its own: who logs never waits for the disk.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import re
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from sys import getsizeof
from typing import Final

ROOT: Final = "llm_serving"
LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")
_UNSEEN: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""What ends a line, steers a terminal or is half a character."""


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; call it with `__name__`."""
    return logging.getLogger(name if name.startswith(ROOT) else f"{ROOT}.{name}")


class OneLine(logging.Formatter):
    """Whatever a client or a file has put into a text, its line is one line; a traceback follows it as it is."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return _UNSEEN.sub(lambda found: repr(found[0])[1:-1], super().formatMessage(record))


def configure_logging(level: str = "INFO", process: str = "master") -> None:
    """Send the package's log lines to standard error; a second call replaces the first.

    Args:
        level: One of `LEVELS`.
        process: Shown in each line, such as "master" or "work_agent 0".
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine(f"%(asctime)s %(levelname)-7s [{process}] %(name)s: %(message)s"))
    logger = logging.getLogger(ROOT)
    for old in logger.handlers[:]:
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


BATCH_S: Final = 0.1
"""Lines are collected for so long before they are written."""
BATCH_CHARS: Final = 2**16
"""Most that is written at once, but for a single longer line."""
MAX_PENDING_BYTES: Final = 16 * 2**20
"""Of memory, for lines that a disk has not taken; one that is further behind loses lines."""
RETRY_S: Final = 1.0
"""After an error the next try is so much later."""
CLOSE_S: Final = 5.0
"""The end of the process waits so long for the disk."""


class RotatingFile(logging.handlers.RotatingFileHandler):
    """`path`, `path.1`, ...: `num_files` files of at most `max_bytes` each, the newest lines in the first.

    Errors are raised where other handlers print them.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, path: Path, max_bytes: int, num_files: int) -> None:
        super().__init__(path, maxBytes=max_bytes, backupCount=num_files - 1, encoding="utf-8", errors="replace")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        raise  # it is called while the error is handled


class LogWriter:
    """Takes lines from any thread and hands them to a handler in the order in which they came.

    A full disk is tried again and again, a slow one gets behind; what does not fit meanwhile is dropped and counted.
    Trouble is told once when it begins and once when it is over.

    Args:
        handler: Its `emit` writes a text of one or several lines or raises; it belongs to the writer from now on.
        say: Told of trouble, on the writer's thread.
    """

    def __init__(self, handler: logging.Handler, say: Callable[[str], None]) -> None:
        self._handler = handler
        self._say = say
        self._pending: deque[str] = deque()
        self._num_bytes = 0
        self._num_lost = 0
        self._fails = False
        self._told = False
        self._is_stale = False
        """Whether the file is to be opened anew."""
        self._lock = threading.Lock()
        self._filled = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Takes one line, without its end; never waits for the disk."""
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
        """What comes from now on goes to a file that is opened anew: somebody has renamed or removed the one before."""
        self._is_stale = True

    def close(self) -> None:
        """Takes no more; what was taken is written unless the disk needs longer than `CLOSE_S`."""
        self._closing.set()
        self._filled.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while True:
            self._filled.wait()
            self._closing.wait(BATCH_S)
            self._filled.clear()
            while lines := self._take():
                self._write(lines)
            if self._closing.is_set() and not self._pending:
                break
        with contextlib.suppress(OSError):
            self._handler.close()

    def _take(self) -> list[str]:
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
                self._handler.close()  # it opens its file when there is something to write
            self._handler.emit(record)
        except Exception as error:  # noqa: BLE001  whatever keeps a line from being written, serving goes on
            with self._lock:
                self._num_lost += len(lines)
            self._fails = True
            self._tell_trouble(f"cannot be written, lines are dropped until it can: {error}")
            return
        self._fails = False
        if self._num_lost == 0:
            return
        self._tell_trouble("is written too slowly, lines are dropped")
        if not self._pending:
            with self._lock:
                num_lost, self._num_lost = self._num_lost, 0
            self._told = False
            self._say(f"is written again; {num_lost} lines were lost")

    def _tell_trouble(self, text: str) -> None:
        if not self._told:
            self._told = True
            self._say(text)
