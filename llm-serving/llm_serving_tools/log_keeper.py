"""`python -m llm_serving_tools.log_keeper FILE BYTES FILES`: copy standard input to rotating log files.

`llm-serving start` pipes the output of the server and its WorkAgents into this process. So the last lines of a crashed
process are still written, and slow disks do not block the server. It exits when all writers have exited.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from llm_serving.log import LogWriter, RotatingFile

READ_BYTES: Final = 2**16
"""Maximum length of a line in bytes. Longer lines are split."""


def main(argv: Sequence[str]) -> int:
    """Copy standard input until it ends. The log of an earlier server is renamed to `FILE.1`."""
    path, max_bytes, num_files = Path(argv[0]), int(argv[1]), int(argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # keep reading while the server shuts down
    file = RotatingFile(path, max_bytes, num_files)
    if path.stat().st_size:
        file.doRollover()
    writer = LogWriter(file, lambda text: writer.put(f"{path} {text}"))
    for line in read_lines(sys.stdin.fileno()):
        writer.put(line)
    writer.close()
    return 0


def read_lines(fd: int) -> Iterator[str]:
    """Yield the lines of a file descriptor, without line ends, as soon as they are complete."""
    rest = b""
    while data := os.read(fd, READ_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) >= READ_BYTES:
            lines, rest = [*lines, rest], b""
        for line in lines:
            yield line.decode(errors="backslashreplace")
    if rest:
        yield rest.decode(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
