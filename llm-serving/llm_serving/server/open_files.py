"""How many files and connections the process may have open, and how many that leaves for clients."""

from __future__ import annotations

import resource
from typing import Final

from llm_serving.config.sections.server import ServerConfig
from llm_serving.errors import ConfigError
from llm_serving.log import get_logger
from llm_serving.server.front_door.acceptor import MAX_WAITING

logger = get_logger(__name__)

MAX_OPEN_FILES: Final = 65536
"""Files and connections the process may have open; the usual 1,024 are fewer than the backlog alone."""
RESERVED_FILES: Final = 56
"""Of these, those that connections leave for everything but WorkAgents."""
FILES_OF_A_WORK_AGENT: Final = 8
"""Sockets, pipes and memory by which the master talks to one, and waits for it; some more while it is started."""
RAISE_FILES: Final = "raise the limit to at least {} (LimitNOFILE of systemd; `ulimit -n`, as root beyond `ulimit -Hn`)"


class OpenFiles:
    """The limit of the process, by what it needs besides clients.

    Args:
        num_work_agents: Processes of WorkAgents.
    """

    def __init__(self, num_work_agents: int = 1) -> None:
        self.reserved = RESERVED_FILES + FILES_OF_A_WORK_AGENT * num_work_agents

    def raise_limit(self, limits: ServerConfig) -> None:
        """Raises the soft limit of open files to `MAX_OPEN_FILES`, or to the hard limit where that is lower.

        Raises:
            ConfigError: So few may be open that there would be none for a connection.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        if soft != resource.RLIM_INFINITY and soft < self.needed(1):
            most = limits.max_connections
            enough = f"{self.needed(1)}, and for serving_config.max_connections ({most}) {self.needed(most)}"
            raise ConfigError(
                f"the process may open {soft} files, of which a server leaves {self.reserved} for other things than "
                f"connections: {RAISE_FILES.format(enough)}"
            )

    def possible_connections(self, limits: ServerConfig) -> int:
        """As many as the configuration allows and the process can have open."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        possible = limits.max_connections
        if soft != resource.RLIM_INFINITY:
            possible = max(1, soft - self.reserved - self.possible_waiting())
        if possible < limits.max_connections:
            logger.warning(
                "at most %d connections, not serving_config.max_connections (%d): the process may open %d files; %s",
                *(possible, limits.max_connections, soft, RAISE_FILES.format(self.needed(limits.max_connections))),
            )
        return min(possible, limits.max_connections)

    def needed(self, num_connections: int) -> int:
        """The least that the process must be able to open, for so many connections and those that wait beside them."""
        return self.reserved + num_connections + max(1, min(MAX_WAITING, (num_connections - 1) // 4))

    def possible_waiting(self) -> int:
        """Connections that may wait to be welcomed: a fifth of the files that the process can have open, at most."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return MAX_WAITING if soft == resource.RLIM_INFINITY else max(1, min(MAX_WAITING, (soft - self.reserved) // 5))
