"""In place of the process that is connected to Ray: no Ray, and WorkAgents that do what their arguments say."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import msgspec
from llm_serving.executor.cluster.ray_messages import AgentEnded, Connected, KillAgent, Order, RayPlaces, Unusable
from llm_serving.transport.channel import Channel

NOWHERE = "10.0.0.1:1"
"""An address without a cluster."""
NOT_YET = "not yet: "
"""Before the path of a file that counts attempts: Ray comes up at the second."""
HANGS = "hangs"
"""An address whose cluster never lets go."""


def main(places: str, socket_fd: str) -> None:
    channel: Channel[Order] = Channel(socket.socket(fileno=int(socket_fd)), Order)  # type: ignore[arg-type]
    address = msgspec.json.decode(places, type=RayPlaces).address
    if address == NOWHERE:
        channel.send(Unusable(f"there is no cluster at {address}"))
        return
    if address is not None and address.startswith(NOT_YET):
        with Path(address.removeprefix(NOT_YET)).open("a+") as attempts:
            attempts.write(f"{os.getpid()}\n")
            attempts.seek(0)
            if len(attempts.readlines()) == 1:
                channel.send(Unusable("it has not come up", again=True))
                return
    channel.send(Connected("127.0.0.1", f"process {os.getpid()}"))
    if address == HANGS:
        signal.pause()
    while True:
        order = channel.receive()
        if isinstance(order, KillAgent):
            channel.send(AgentEnded(order.number, "killed"))
            continue
        for arguments in order.ranks:
            if "end" in arguments:
                channel.send(AgentEnded(order.number, f"ended with {' '.join(arguments)}"))
            elif "lose Ray" in arguments:
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
