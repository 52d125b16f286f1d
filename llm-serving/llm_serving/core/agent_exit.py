"""Exit codes of WorkAgents: what one that came to no conversation with its master can still say, wherever it ran."""

from __future__ import annotations

from enum import IntEnum


class AgentExit(IntEnum):
    """As a process ends with it; a signal is the negative of its number."""

    ENDED = 0
    """Its master told it to, or is gone."""
    BROKEN = 1
    """The channel, in the middle of a frame."""
    NO_SECRET = 3
    UNREACHABLE = 4
    RANK_LOST = 5


_SAID = {
    AgentExit.NO_SECRET: "its machine has another cluster_config.secret_file than the master, or none that can be used",
    AgentExit.UNREACHABLE: "it did not reach the master at cluster_config.master_host",
    AgentExit.RANK_LOST: "another rank of its replica is gone, or does something else",
}


def described_exit(code: int | None) -> str:
    """As in "code 4: it did not reach ..."."""
    said = next((f": {text}" for known, text in _SAID.items() if known == code), "")
    return f"code {code}{said}"
