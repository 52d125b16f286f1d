"""Binding a port before anything else is loaded, which tells early what keeps it from being used."""

from __future__ import annotations

import errno
import socket
from typing import Final

from llm_serving.errors import ConfigError

BACKLOG: Final = 2048
"""Connections the kernel keeps until they are accepted."""
UNSENT_BYTES: Final = 128 * 1024
"""Bytes of a connection that the kernel takes beyond what is on its way to the client. Without, it takes megabytes of
each client that reads nothing, in memory that counts as nobody's, and a dozen answers are computed to fill them."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on the address; connections wait until the server accepts them.

    Raises:
        ConfigError: The port is taken, or the address is not of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"serving_config.server_ip: {host} is not an address: {error.strerror}") from None
    except UnicodeError as error:  # a part of a name that is empty, or longer than such a part may be
        raise ConfigError(f"serving_config.server_ip: {host} is not an address: {error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)  # connections inherit it
        listener.bind(address)
        listener.listen(BACKLOG)  # with SO_REUSEADDR a taken port may show here only
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            rule = "is in use by another program; stop that, or choose another port with --port"
            raise ConfigError(f"serving_config.server_port: {host}:{port} {rule}") from None
        raise ConfigError(f"serving_config.server_ip: cannot bind to {host}:{port}: {error.strerror}") from None
    return listener
