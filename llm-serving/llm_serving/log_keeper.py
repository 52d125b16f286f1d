"""`python -m llm_serving.log_keeper FILE BYTES FILES`: keeps what comes through standard input in files that rotate.

`llm-serving start` puts it behind the server and its WorkAgents. It is a process of its own, so that the last words of
one that crashes are kept too, and it reads on whatever the disk does, so that nobody waits who writes. It ends when the
last of them has.
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
"""A line is cut when it gets as long."""


def main(argv: Sequence[str]) -> int:
    """Reads until the end of standard input; what an earlier server wrote is `FILE.1` from then on."""
    path, max_bytes, num_files = Path(argv[0]), int(argv[1]), int(argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever ends a server still wants to read how it ended
    file = RotatingFile(path, max_bytes, num_files)
    if path.stat().st_size:
        file.doRollover()
    writer = LogWriter(file, lambda text: writer.put(f"{path} {text}"))
    for line in read_lines(sys.stdin.fileno()):
        writer.put(line)
    writer.close()
    return 0


def read_lines(fd: int) -> Iterator[str]:
    """The lines of a file descriptor, without their ends, as soon as they are complete."""
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
