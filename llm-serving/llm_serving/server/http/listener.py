"""Opens the listening socket, and raises the limit of open files."""

from __future__ import annotations

import errno
import resource
import socket
from typing import Final

from llm_serving.config.sections.server import ServerConfig
from llm_serving.errors import ConfigError
from llm_serving.log import get_logger

logger = get_logger(__name__)

BACKLOG: Final = 2048
UNSENT_BYTES: Final = 128 * 1024
"""Maximum unsent bytes that the kernel buffers for a connection. Its default is megabytes."""
MAX_OPEN_FILES: Final = 65536
RESERVED_FILES: Final = 56
FILES_OF_A_WORK_AGENT: Final = 8
RAISE_FILES: Final = "raise the limit to at least {} (LimitNOFILE of systemd; `ulimit -n`, as root beyond `ulimit -Hn`)"


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raise ConfigError if the address is in use or does not belong to this machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"serving_config.server_ip: {host} is not an address: {error.strerror}") from None
    except UnicodeError as error:  # a part of the name is empty or too long
        raise ConfigError(f"serving_config.server_ip: {host} is not an address: {error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)  # connections inherit it
        listener.bind(address)
        listener.listen(BACKLOG)  # with SO_REUSEADDR a port in use may fail only here
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            rule = "is in use by another program; stop that program, or choose another port with --port"
            raise ConfigError(f"serving_config.server_port: {host}:{port} {rule}") from None
        raise ConfigError(f"serving_config.server_ip: cannot bind to {host}:{port}: {error.strerror}") from None
    return listener


class OpenFiles:
    def __init__(self, num_work_agents: int = 1) -> None:
        self.reserved = RESERVED_FILES + FILES_OF_A_WORK_AGENT * num_work_agents

    def raise_limit(self, limits: ServerConfig) -> None:
        """Increase the soft limit of open files. Raise ConfigError if no file descriptor is left for connections."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        target = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
        if soft != resource.RLIM_INFINITY and soft < target:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
            soft = target
        if soft != resource.RLIM_INFINITY and soft < self.needed(1):
            most = limits.max_connections
            enough = f"{self.needed(1)}, and for serving_config.max_connections ({most}) {self.needed(most)}"
            raise ConfigError(
                f"the process may open {soft} files, and needs {self.reserved} for purposes other than "
                f"connections: {RAISE_FILES.format(enough)}"
            )

    def possible_connections(self, limits: ServerConfig) -> int:
        """Return `max_connections`, or fewer if the limit of open files allows only fewer connections."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = limits.max_connections
        possible = most if soft == resource.RLIM_INFINITY else min(most, max(1, soft - self.reserved))
        if possible < most:
            logger.warning(
                "the server accepts at most %d connections, not serving_config.max_connections (%d): the process may "
                "open %d files; %s",
                *(possible, most, soft, RAISE_FILES.format(self.needed(most))),
            )
        return possible

    def needed(self, num_connections: int) -> int:
        return self.reserved + num_connections
