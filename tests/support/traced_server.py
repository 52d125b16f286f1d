"""Runs the server with a profile hook, to count the files and functions of the package that a request enters.

    python traced_server.py serve --model demo --port 8080

The line `start` on standard input begins a count; the line `stop` ends it and prints the functions entered, as one
line of JSON: [[file, function], ...], files relative to the package. It is answered once no function has been new for
`QUIET_S`: other threads have work after the last byte of the answer. Functions of all threads count, and comprehensions
as functions of their own where the interpreter runs them as such (before Python 3.12). The thread that trims the heap
every second does not count, because it runs beside some requests and not beside others.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from types import FrameType
from typing import Final

PACKAGE: Final = "/llm_serving/"
QUIET_S: Final = 0.3
PERIODIC_THREAD: Final = "heap-trim"

entered: set[tuple[str, str]] = set()
is_counting = False


def record_call(frame: FrameType, event: str, argument: object) -> None:
    """Add the called function to `entered` if it belongs to the package."""
    if is_counting and event == "call" and threading.current_thread().name != PERIODIC_THREAD:
        code = frame.f_code
        _, found, file = code.co_filename.rpartition(PACKAGE)
        if found:
            entered.add((file, code.co_qualname))


def obey_standard_input() -> None:
    """Start and stop counts until standard input ends."""
    global is_counting
    for line in sys.stdin:
        if line == "start\n":
            entered.clear()
            is_counting = True
            continue
        num_entered = -1
        while num_entered != len(entered):
            num_entered = len(entered)
            time.sleep(QUIET_S)
        is_counting = False
        sys.stdout.write(json.dumps(sorted(entered)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    threading.setprofile(record_call)
    sys.setprofile(record_call)
    threading.Thread(target=obey_standard_input, daemon=True).start()

    from llm_serving.cli.main import main

    sys.exit(main(sys.argv[1:]))
