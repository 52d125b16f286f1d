"""Reads of untrusted files, lock files, and checks that UTF-8 can encode a text."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from llm_serving.errors import ConfigError, ModelError, shorten


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, unbuffered. Raise ModelError if that fails."""
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer; without O_NOCTTY, a terminal could control the process.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ModelError(f"{path}: must be a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def read_regular(path: Path, max_bytes: int) -> bytes:
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


def lock_file(path: Path) -> int | None:
    """Lock a file, and create it if it is missing. Return its descriptor, or None if another process holds the lock."""
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


def lock_folder(folder: Path, key: str, mode: int = 0o777) -> int:
    """Lock a folder for this process, and create it if it is missing. Return the descriptor of the lock. Raise
    ConfigError, which names the YAML key `key`, if the folder cannot be used or another process holds the lock.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=mode)
        lock = lock_file(folder / "lock")
    except OSError as error:
        raise ConfigError(f"{key}: {folder} cannot be used: {error.strerror}") from None
    if lock is None:
        raise ConfigError(f"{key}: {folder} is used by another server")
    return lock


def is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_json(data: bytes) -> object:
    """Parse JSON. Raise ValueError if it is invalid or has a lone surrogate, RecursionError if nested too deeply."""
    text = data.decode(json.detect_encoding(data))  # unlike `json.loads`, this refuses encoded surrogates
    content: object = json.loads(text)
    if "\\u" in text:
        json.dumps(content, ensure_ascii=False).encode()
    return content


def read_json(path: Path, max_bytes: int, parse: Callable[[bytes], Any] = json.loads) -> Any:
    """Return the JSON content of a regular file. Raise ModelError if it cannot be read or `parse` raises an error."""
    try:
        return parse(read_regular(path, max_bytes))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None


def read_json_object(path: Path, max_bytes: int, parse: Callable[[bytes], Any] = json.loads) -> dict[str, Any]:
    content = read_json(path, max_bytes, parse)
    if not isinstance(content, dict):
        raise ModelError(f"{path}: must be a JSON object. Given: {shorten(content)}")
    return content


def escape_surrogates(text: str) -> str:
    r"""Replace characters that UTF-8 cannot encode by escapes such as \udc80."""
    return text.encode("utf-8", "backslashreplace").decode()
