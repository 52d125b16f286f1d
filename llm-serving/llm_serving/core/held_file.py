"""A file that one process at a time has, so that what lies beside it is no other's."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


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
