"""Gives tests and the processes that they start the same state, whatever shell started them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import MutableMapping
from typing import Final

CAUGHT: Final = (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a shell may leave ignored: `nohup` does so with SIGHUP, scripts do with SIGQUIT of their background
jobs.
"""

UMASK: Final = 0o022
REMOVED: Final = ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy", "no_proxy", "language", "tz")
"""Lower-case names of environment variables that change tests; upper-case names are removed as well."""

LOCALE: Final = "C.UTF-8"


def reset_inherited_state(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set dispositions of signals, umask, standard input, proxies, time zone and locale.

    Every process that a test starts would inherit an ignored signal. It does not inherit a caught one, because exec
    restores its default. So the tests survive SIGHUP, and their servers can receive it.
    """
    for number in CAUGHT:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, _do_nothing)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.umask(UMASK)
    _open_standard_input()
    for name in list(environment):
        if name.lower() in REMOVED or name.startswith("LC_"):
            del environment[name]
    environment["LANG"] = LOCALE
    time.tzset()


def _do_nothing(number: int, frame: object) -> None:
    """Handle a signal by ignoring it."""


def _open_standard_input() -> None:
    """Open /dev/null if standard input is closed: otherwise the next opened file would become standard input."""
    try:
        os.fstat(0)
    except OSError:
        opened = os.open(os.devnull, os.O_RDONLY)
        if opened != 0:
            os.dup2(opened, 0)
            os.close(opened)
        os.set_inheritable(0, True)
