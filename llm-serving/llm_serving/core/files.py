"""Reading files that somebody else made: a folder of weights may hold pipes, devices and files without end.

A file that one process at a time has, so that what lies beside it is no other's.

Texts that UTF-8 has a form for: an escape of JSON or YAML, or the name of a file, may hold half a character.
"""

from __future__ import annotations

import fcntl
import json
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


def hold(path: Path) -> int | None:
    """A descriptor that holds the file, which is made where it is missing; None: another holds it.

    It is held until the descriptor is closed, and no longer than the process lives, in whatever way that ends.

    Raises:
        OSError: It cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_unicode(text: str) -> bool:
    """Whether it can be sent to another process, written to a file or told to a client."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def json_of(data: bytes) -> object:
    """A JSON text whose strings are all Unicode.

    Raises:
        ValueError: It is none.
        RecursionError: It is nested too deeply.
    """
    content: object = json.loads(data)
    if b"\\u" in data:
        json.dumps(content, ensure_ascii=False).encode()
    return content


def escaped(text: str) -> str:
    r"""The same, with what is no Unicode as an escape such as \udc80."""
    return text.encode("utf-8", "backslashreplace").decode()
