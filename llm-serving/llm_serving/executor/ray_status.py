"""What a Ray cluster consists of."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from llm_serving.executor.ray_process import DEVICE, connected


def status_lines(address: str) -> Iterator[str]:
    """A line for each machine: address, state, cores and devices free and in all, WorkAgents.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster at the address.
    """
    with connected(address) as ray:
        free = importlib.import_module("ray._private.state").available_resources_per_node()
        agents = _agents(ray)
        rows = [("MACHINE", "STATE", "CORES FREE", "DEVICES FREE", "WORK AGENTS")]
        for node in sorted(ray.nodes(), key=lambda node: (not node["Alive"], node["NodeManagerAddress"])):
            name, left = node["NodeID"], free.get(node["NodeID"], {})
            rows.append(
                (
                    node["NodeManagerAddress"],
                    "alive" if node["Alive"] else "gone",
                    _share(left, node["Resources"], "CPU"),
                    _share(left, node["Resources"], DEVICE),
                    str(agents[name]),
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()


def _share(left: dict[str, float], total: dict[str, float], name: str) -> str:
    return f"{left.get(name, 0.0):g} of {total.get(name, 0.0):g}"


def _agents(ray: Any) -> Counter[str]:
    """Living WorkAgents by machine, those of every server."""
    state = importlib.import_module("ray._private.state")
    actors = state.actors().values()
    return Counter(
        actor["Address"]["NodeID"]
        for actor in actors
        if actor["State"] == "ALIVE" and actor.get("ActorClassName", "").endswith("AgentHost")
    )
