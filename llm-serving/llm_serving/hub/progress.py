"""How far a download is: a bar on a terminal, a line from time to time in a log."""

from __future__ import annotations

import sys
from typing import Any, Final, TextIO

from tqdm import tqdm

LOG_INTERVAL_S: Final = 10.0


class Progress(tqdm):
    """A tqdm bar that is on whatever the environment says of bars, and that a log can take."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.pop("name", None)  # of the library's own class
        options |= {"disable": False, "file": options.get("file") or sys.stderr, "leave": True}
        if not options["file"].isatty():
            options |= {"file": _Lines(options["file"]), "mininterval": LOG_INTERVAL_S, "ascii": True, "ncols": 100}
        super().__init__(*args, **options)


class _Lines:
    """A text stream in which every state of a bar is a line of its own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        for part in text.split("\r"):
            if part.strip():
                self._stream.write(part.rstrip("\n ") + "\n")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()
