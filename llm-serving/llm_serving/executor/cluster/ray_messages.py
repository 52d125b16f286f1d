"""Messages between the master and its Ray process (`ray_process`)."""

from __future__ import annotations

import msgspec


class RayWeights(msgspec.Struct, frozen=True):
    """A model folder of the master that Ray's object store copies to the other machines."""

    folder: str
    cache: str
    """Folder for the copies on every machine."""


class RayRequirements(msgspec.Struct, frozen=True):
    """What a server requires of a Ray cluster."""

    address: str | None
    num_replicas: int
    cpus: int
    """Number of cores of a replica with all its ranks. All ranks run on one machine."""
    strategy: str
    num_devices: int
    weights: RayWeights | None = None
    """Weights to send to the machines; None: every machine has the model at the same path."""


class StartAgent(msgspec.Struct, tag="start", frozen=True):
    number: int
    index: int
    ranks: tuple[tuple[str, ...], ...]


class KillAgent(msgspec.Struct, tag="kill", frozen=True):
    number: int


class RayConnected(msgspec.Struct, tag="connected", frozen=True):
    """Reports that the cluster has reserved resources for all WorkAgents."""

    host: str
    resources: str


class RayUnavailable(msgspec.Struct, tag="unusable", frozen=True):
    error: str
    is_retryable: bool = False


class AgentEnded(msgspec.Struct, tag="ended", frozen=True):
    number: int
    exit_description: str


RayCommand = StartAgent | KillAgent
RayReport = RayConnected | RayUnavailable | AgentEnded
