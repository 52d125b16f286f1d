"""What a system may have none of for the moment: descriptors, memory, processes, threads."""

from __future__ import annotations

import errno
import os
from typing import Final

_NUMBERS: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN))
"""The last one is that of processes."""
_NO_THREAD: Final = "can't start new thread"
"""Python says it by no number."""


def shortage(error: BaseException) -> str | None:
    """What there was too little of, in the words of the system; None: it was something else."""
    if isinstance(error, OSError) and error.errno in _NUMBERS:
        return os.strerror(error.errno)
    if isinstance(error, MemoryError):
        return os.strerror(errno.ENOMEM)
    return _NO_THREAD if isinstance(error, RuntimeError) and str(error) == _NO_THREAD else None
