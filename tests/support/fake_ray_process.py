"""A fake of the process that is connected to Ray: it uses no Ray, and starts the WorkAgents given by its arguments."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import msgspec
from llm_serving.executor.cluster.ray_starter import (
    AgentEnded,
    KillAgent,
    RayCommand,
    RayConnected,
    RayRequirements,
    RayUnavailable,
)
from llm_serving.transport.channel import Channel

NOWHERE = "10.0.0.1:1"
"""An address without a cluster."""
NOT_YET = "not yet: "
"""Prefix of the path of a file that counts attempts: Ray starts at the second."""
HANGS = "hangs"
"""An address whose cluster never disconnects."""


def main(requirements: str, socket_fd: str) -> None:
    channel: Channel[RayCommand] = Channel(socket.socket(fileno=int(socket_fd)), RayCommand)  # type: ignore[arg-type]
    address = msgspec.json.decode(requirements, type=RayRequirements).address
    if address == NOWHERE:
        channel.send(RayUnavailable(f"there is no cluster at {address}"))
        return
    if address is not None and address.startswith(NOT_YET):
        with Path(address.removeprefix(NOT_YET)).open("a+") as attempts:
            attempts.write(f"{os.getpid()}\n")
            attempts.seek(0)
            if len(attempts.readlines()) == 1:
                channel.send(RayUnavailable("it has not come up", is_retryable=True))
                return
    channel.send(RayConnected("127.0.0.1", f"process {os.getpid()}"))
    if address == HANGS:
        signal.pause()
    while True:
        command = channel.receive()
        if isinstance(command, KillAgent):
            channel.send(AgentEnded(command.number, "killed"))
            continue
        for arguments in command.ranks:
            if "end" in arguments:
                channel.send(AgentEnded(command.number, f"ended with {' '.join(arguments)}"))
            elif "lose Ray" in arguments:
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
