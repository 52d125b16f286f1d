"""The files of a recording. A background thread writes them."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import BinaryIO, Final

from llm_serving.log import get_logger

logger = get_logger(__name__)

MAX_PENDING_BYTES: Final = 64 * 2**20
BATCH_S: Final = 0.1
CLOSE_S: Final = 10.0


class RecordFiles:
    """Files `{name}-{number}.rec` in a folder. Numbers continue after existing files; the oldest files are deleted.
    Only the background thread and `close` wait for the disk. The first error stops the recording, with one log line.
    """

    def __init__(self, folder: Path, name: str, max_files: int) -> None:
        self._folder = folder
        self._name = name
        self._max_files = max_files
        self._file: BinaryIO | None = None
        self.is_open = True
        self._is_complete = False
        self._pending: list[tuple[bool, bytes]] = []
        self._pending_bytes = 0
        self._lock = threading.Lock()
        self._filled = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"record-{name}", daemon=True)
        self._thread.start()

    def begin(self, data: bytes) -> None:
        self._put(True, data)

    def append(self, data: bytes) -> None:
        self._put(False, data)

    def close(self) -> bool:
        self._closing.set()
        self._filled.set()
        self._thread.join(CLOSE_S)
        return self._is_complete

    def _put(self, begins: bool, data: bytes) -> None:
        with self._lock:
            self._pending.append((begins, data))
            self._pending_bytes += len(data)
        if self._pending_bytes > MAX_PENDING_BYTES:
            self._stop(f"{MAX_PENDING_BYTES} bytes wait to be written")
        if not self._filled.is_set():
            self._filled.set()

    def _run(self) -> None:
        try:
            while self.is_open:
                self._filled.wait()
                self._closing.wait(BATCH_S)
                is_last = self._closing.is_set()
                self._filled.clear()
                self._write()
                if is_last:
                    self._is_complete = self.is_open
                    return
        except OSError as error:
            self._stop(str(error))
        finally:
            self.is_open = False
            if self._file is not None:
                self._file.close()

    def _write(self) -> None:
        with self._lock:
            pending, self._pending, self._pending_bytes = self._pending, [], 0
        start = 0
        for index, (begins, data) in enumerate(pending):
            if begins:
                self._write_all(b"".join(data for _, data in pending[start:index]))
                self._begin_file()
                start = index
        self._write_all(b"".join(data for _, data in pending[start:]))

    def _write_all(self, data: bytes) -> None:
        if self._file is not None and data:
            view = memoryview(data)
            while view:  # an unbuffered write may be partial
                view = view[self._file.write(view) :]

    def _begin_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        existing = self._existing()
        number = existing[-1][0] + 1 if existing else 1
        path = self._folder / f"{self._name}-{number:06}.rec"
        path.touch(mode=0o600, exist_ok=False)  # it contains prompts of users
        self._file = path.open("ab", buffering=0)
        logger.info("%s: began a recording file path=%s", self._name, path)
        for _, old in existing[: max(0, len(existing) + 1 - self._max_files)]:
            old.unlink(missing_ok=True)

    def _existing(self) -> list[tuple[int, Path]]:
        pattern = re.compile(re.escape(self._name) + r"-(\d{6,12})\.rec")
        matches = ((pattern.fullmatch(path.name), path) for path in self._folder.iterdir())
        return sorted((int(match[1]), path) for match, path in matches if match is not None)

    def _stop(self, reason: str) -> None:
        if self.is_open:
            self.is_open = False
            logger.error("%s: stopped the recording, serving continues: reason=%s", self._name, reason)
        with self._lock:
            self._pending, self._pending_bytes = [], 0
