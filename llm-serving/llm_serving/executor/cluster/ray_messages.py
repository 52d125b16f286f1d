"""What a master and the process that is connected to Ray for it tell each other."""

from __future__ import annotations

import msgspec


class RayWeights(msgspec.Struct, frozen=True):
    """A model folder of the master's machine that the others get through Ray's object store."""

    folder: str
    cache: str
    """Folder of every machine where they keep it."""


class RayPlaces(msgspec.Struct, frozen=True):
    """What is asked of a cluster. `RayStarter` says what each means."""

    address: str | None
    num_replicas: int
    cpus: int
    """Of a replica, as are devices: on one machine, all its ranks together."""
    spread: str
    num_devices: int
    weights: RayWeights | None = None
    """None: every machine has them at the same path."""


class StartAgent(msgspec.Struct, tag="start", frozen=True):
    number: int
    """Of this start; each has its own."""
    index: int
    ranks: tuple[tuple[str, ...], ...]
    """Arguments of each."""


class KillAgent(msgspec.Struct, tag="kill", frozen=True):
    number: int


class Connected(msgspec.Struct, tag="connected", frozen=True):
    """There are places for all WorkAgents."""

    host: str
    """The address by which the cluster knows the master's machine."""
    resources: str


class Unusable(msgspec.Struct, tag="unusable", frozen=True):
    error: str
    again: bool = False
    """Whether another attempt may do."""


class AgentEnded(msgspec.Struct, tag="ended", frozen=True):
    number: int
    how: str


Order = StartAgent | KillAgent
Report = Connected | Unusable | AgentEnded
