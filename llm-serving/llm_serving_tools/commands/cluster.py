"""`llm-serving cluster`: show a cluster, drain replicas and let drained replicas join again."""

from __future__ import annotations

import argparse
import importlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from llm_serving.cli.arguments import add_command

from llm_serving_tools.server_client import ADMINISTRATOR_KEY, add_server_arguments, call
from llm_serving_tools.text_table import aligned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    status = add_command(
        subcommands, "status", run_status, "show the machines of a Ray cluster, their free resources and WorkAgents"
    )
    status.add_argument(
        "--address", default="auto", help="address as in cluster_config.address; default: a cluster on this machine"
    )
    replicas = add_command(subcommands, "replicas", run_replicas, "show the state of each replica of a server")
    add_server_arguments(replicas, ADMINISTRATOR_KEY)
    replicas.set_defaults(order=None)
    for order, what in (
        ("drain", "let a replica finish its requests and leave"),
        ("join", "let a drained replica serve again"),
    ):
        of_one = add_command(subcommands, order, run_replicas, what)
        of_one.add_argument(
            "replica", type=int, metavar="N", help="number of the replica, as `cluster replicas` shows it"
        )
        add_server_arguments(of_one, ADMINISTRATOR_KEY)
        of_one.set_defaults(order=order)


def run_status(arguments: argparse.Namespace) -> int:
    from llm_serving.executor.cluster.ray_process import DEVICE, connect_to_ray

    with connect_to_ray(arguments.address) as ray:
        rows = list(_machine_rows(ray, DEVICE))
    print("\n".join(aligned(rows)), flush=True)
    return 0


def _machine_rows(ray: Any, device: str) -> Iterator[tuple[str, ...]]:
    """Yield a row for each machine: address, state, free and total cores and devices, WorkAgents."""
    state = importlib.import_module("ray._private.state")
    free = state.available_resources_per_node()
    agents = Counter(
        actor["Address"]["NodeID"]
        for actor in state.actors().values()
        if actor["State"] == "ALIVE" and actor.get("ActorClassName", "").endswith("AgentHost")
    )
    yield "MACHINE", "STATE", "CORES FREE", "DEVICES FREE", "WORK AGENTS"
    for node in sorted(ray.nodes(), key=lambda node: (not node["Alive"], node["NodeManagerAddress"])):
        name, left = node["NodeID"], free.get(node["NodeID"], {})
        yield (
            node["NodeManagerAddress"],
            "alive" if node["Alive"] else "gone",
            *(f"{left.get(kind, 0.0):g} of {node['Resources'].get(kind, 0.0):g}" for kind in ("CPU", device)),
            str(agents[name]),
        )


def run_replicas(arguments: argparse.Namespace) -> int:
    path, method = "/v1/replicas", "GET"
    if arguments.order is not None:
        path, method = f"{path}/{arguments.replica}/{arguments.order}", "POST"
    for replica, state, num_unfinished, machine in call(arguments, path, _replica_rows, method):
        where = f"  at {machine}" if machine else ""
        print(f"{replica:>4}  {state:<10}  {num_unfinished} unfinished{where}", flush=True)
    return 0


def _replica_rows(content: Any) -> list[tuple[Any, ...]]:
    return [(each["replica"], each["state"], each["num_unfinished"], each["machine"]) for each in content["replicas"]]
