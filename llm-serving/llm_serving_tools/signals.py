"""Orderly termination on signals."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Return a context for the main thread in which SIGTERM and SIGHUP, unless ignored, raise KeyboardInterrupt."""
    before = {each: signal.getsignal(each) for each in _SIGNALS}
    for each, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(each, signal.default_int_handler)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
