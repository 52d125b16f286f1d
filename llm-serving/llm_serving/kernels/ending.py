"""Who is told that a step is about to end."""

from __future__ import annotations

from collections.abc import Callable

from llm_serving.kernels import library


def announce_ending(tell: Callable[[], None] | None) -> None:
    """Has `tell` called, once, when the layers of the next program are nearly done, in place of what was given before.

    It is called by a thread of the operators, which computes on when it returns.
    """
    _listener.tell = tell
    library.load().llm_announce_ending(_ending_is_near if tell is not None else library.Callback())


class _Listener:
    tell: Callable[[], None] | None = None


_listener = _Listener()


@library.Callback
def _ending_is_near() -> None:
    if _listener.tell is not None:
        _listener.tell()
