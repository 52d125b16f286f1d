"""Gives the tests, and the processes that they start, the same state whatever shell started them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import MutableMapping
from typing import Final

CAUGHT: Final = (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a shell may leave ignored: `nohup` does so with SIGHUP, a script with SIGQUIT of its background jobs."""

UMASK: Final = 0o022
REMOVED: Final = ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy", "no_proxy", "language", "tz")
"""Environment variables, in lower case, that change what tests see; either case is removed."""

LOCALE: Final = "C.UTF-8"


def reset_inherited_state(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set dispositions of signals, umask, standard input, proxies, time zone and locale.

    A signal that is ignored here would be ignored by every process that a test starts. One that is caught is not: exec
    gives it its default again. So the tests themselves go on after a hangup, and their servers can be hung up on.
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
    """Catch a signal and do nothing about it."""


def _open_standard_input() -> None:
    """Open /dev/null where standard input is closed: else the next file that is opened would become it."""
    try:
        os.fstat(0)
    except OSError:
        opened = os.open(os.devnull, os.O_RDONLY)
        if opened != 0:
            os.dup2(opened, 0)
            os.close(opened)
        os.set_inheritable(0, True)
