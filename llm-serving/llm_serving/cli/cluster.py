"""`llm-serving cluster`: machines and places of a Ray cluster, and the replicas of a running server."""

from __future__ import annotations

import argparse
import json
from typing import Final

from llm_serving.cli.arguments import Subcommands, add_server_arguments, api_key_of

WHOSE_KEY: Final = "an administrator's; "


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "cluster", help="look at a cluster, and have replicas leave and join", allow_abbrev=False
    )
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    status = subcommands.add_parser(
        "status",
        help="machines of a Ray cluster, what is free on them, and the WorkAgents they have",
        allow_abbrev=False,
    )
    status.add_argument("--address", default="auto", help="as cluster_config.address; default: one on this machine")
    status.set_defaults(run=run_status)
    replicas = subcommands.add_parser("replicas", help="what each replica of a server does", allow_abbrev=False)
    add_server_arguments(replicas, WHOSE_KEY)
    replicas.set_defaults(run=run_replicas, order=None)
    for order, what in (
        ("drain", "have a replica finish what it has, and leave"),
        ("join", "have a replica that was drained serve again"),
    ):
        of_one = subcommands.add_parser(order, help=what, allow_abbrev=False)
        of_one.add_argument("replica", type=int, metavar="N", help="its number, as `replicas` tells it")
        add_server_arguments(of_one, WHOSE_KEY)
        of_one.set_defaults(run=run_replicas, order=order)


def run_status(arguments: argparse.Namespace) -> int:
    from llm_serving.executor.cluster.ray_process import status_lines

    print("\n".join(status_lines(arguments.address)), flush=True)
    return 0


def run_replicas(arguments: argparse.Namespace) -> int:
    from llm_serving.cli.server_call import ServerRefusal, opened

    path, method = "/v1/replicas", "GET"
    if arguments.order is not None:
        path, method = f"{path}/{arguments.replica}/{arguments.order}", "POST"
    with opened(arguments.url, path, api_key_of(arguments), method=method) as response:
        try:
            rows = [
                (each["replica"], each["state"], each["num_unfinished"], each["machine"])
                for each in json.load(response)["replicas"]
            ]
        except (ValueError, LookupError, TypeError):
            raise ServerRefusal(f"{arguments.url} does not answer as this server does") from None
    for replica, state, num_unfinished, machine in rows:
        where = f"  at {machine}" if machine else ""
        print(f"{replica:>4}  {state:<10}  {num_unfinished} unfinished{where}", flush=True)
    return 0
