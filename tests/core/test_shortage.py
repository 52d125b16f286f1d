"""What a system has none of for the moment is told apart from faults."""

from __future__ import annotations

import errno

import pytest
from llm_serving.core.memory import shortage


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (OSError(errno.EMFILE, "x"), "Too many open files"),
        (OSError(errno.ENOMEM, "x"), "Cannot allocate memory"),
        (BlockingIOError(errno.EAGAIN, "x"), "Resource temporarily unavailable"),
        (MemoryError(), "Cannot allocate memory"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (OSError(errno.ENOENT, "x"), None),
        (OSError("x"), None),
        (RuntimeError("x"), None),
        (ValueError(), None),
    ],
)
def test_what_there_is_too_little_of(error, what):
    assert shortage(error) == what
