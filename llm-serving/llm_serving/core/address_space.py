"""How much memory the system lets a process map, and errors that come of too little."""

from __future__ import annotations

import resource
from typing import Final

from llm_serving.core.shortage import shortage

ENOUGH_GB: Final = 4
"""For MindSpore and its threads, beside the weights and the blocks."""
_WORDS: Final = ("allocate memory", "bad_alloc", "failed to map", "resource temporarily unavailable")
"""Of errors of frameworks, which have no numbers; small letters."""


def limit_told() -> str | None:
    """What a process may map and what to do, where the system sets a limit (`ulimit -v`); None: it sets none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return (
        f"a process may map {limit / 1e9:.1f} GB (`ulimit -v`, LimitAS of systemd): a WorkAgent needs {ENOUGH_GB} GB "
        "beside its weights and blocks; take the limit away (`ulimit -v unlimited`) or raise it"
    )


def limit_reached(error: BaseException) -> str | None:
    """The same, where an error that somebody else raised may come of that limit."""
    lacks_memory = shortage(error) is not None or any(each in str(error).lower() for each in _WORDS)
    return limit_told() if lacks_memory else None
