"""Reading files that somebody else made: a folder of weights may hold pipes, devices and files without end."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from llm_serving.errors import ModelError


def open_regular(path: Path) -> BinaryIO:
    """A regular file, open for reading without a buffer; a link to one is one.

    Raises:
        ModelError: It is a folder, a device or a pipe (which is never waited for), or cannot be opened.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits until somebody writes it; O_NOCTTY is for terminals.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ModelError(f"{path}: must be a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The bytes of a regular file.

    Raises:
        ModelError: It is none, cannot be read, or has more than `max_bytes`, however many it seemed to have before.
    """
    with open_regular(path) as file:
        parts, size = [], 0
        try:
            while part := file.read(min(max_bytes + 1 - size, 2**20)):
                parts.append(part)
                size += len(part)
                if size > max_bytes:
                    raise ModelError(f"{path}: must be at most {max_bytes} bytes")
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    return b"".join(parts)
