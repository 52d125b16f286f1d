"""Commands for administrators of a running server: `cluster` and `reload`."""

from __future__ import annotations

import argparse
import json
from typing import Final

from llm_serving.cli.arguments import Subcommands, add_command, add_server_arguments, api_key_of, url_of
from llm_serving.cli.server_call import ServerRefusal, opened

KEY_HELP: Final = "an administrator's; "


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "cluster", help="show a cluster, drain replicas and let them join again", allow_abbrev=False
    )
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    status = add_command(
        subcommands, "status", run_status, "machines of a Ray cluster, their free resources and their WorkAgents"
    )
    status.add_argument(
        "--address", default="auto", help="address as in cluster_config.address; default: a cluster on this machine"
    )
    replicas = add_command(subcommands, "replicas", run_replicas, "state of each replica of a server")
    add_server_arguments(replicas, KEY_HELP)
    replicas.set_defaults(order=None)
    for order, what in (
        ("drain", "let a replica finish its requests and leave"),
        ("join", "let a drained replica serve again"),
    ):
        of_one = add_command(subcommands, order, run_replicas, what)
        of_one.add_argument("replica", type=int, metavar="N", help="its number, as `replicas` shows it")
        add_server_arguments(of_one, KEY_HELP)
        of_one.set_defaults(order=order)
    reload = add_command(
        commands,
        "reload",
        run_reload,
        "make a running server read its YAML again: limits, keys, classes, policy and budgets",
    )
    add_server_arguments(reload, KEY_HELP)


def run_status(arguments: argparse.Namespace) -> int:
    from llm_serving.executor.cluster.ray_process import status_lines

    print("\n".join(status_lines(arguments.address)), flush=True)
    return 0


def run_replicas(arguments: argparse.Namespace) -> int:
    path, method = "/v1/replicas", "GET"
    if arguments.order is not None:
        path, method = f"{path}/{arguments.replica}/{arguments.order}", "POST"
    with opened(url_of(arguments), path, api_key_of(arguments), method=method) as response:
        try:
            rows = [
                (each["replica"], each["state"], each["num_unfinished"], each["machine"])
                for each in json.load(response)["replicas"]
            ]
        except (ValueError, LookupError, TypeError):
            raise ServerRefusal(f"{url_of(arguments)} does not answer like an llm-serving server") from None
    for replica, state, num_unfinished, machine in rows:
        where = f"  at {machine}" if machine else ""
        print(f"{replica:>4}  {state:<10}  {num_unfinished} unfinished{where}", flush=True)
    return 0


def run_reload(arguments: argparse.Namespace) -> int:
    with opened(url_of(arguments), "/v1/reload", api_key_of(arguments), method="POST") as response:
        try:
            answer = json.load(response)
            changed, late = list(map(str, answer["changed"])), list(map(int, answer["late"]))
        except (ValueError, LookupError, TypeError):
            raise ServerRefusal(f"{url_of(arguments)} does not answer like an llm-serving server") from None
    print("\n".join(changed) or "nothing has changed", flush=True)
    if late:
        print(
            f"replicas {', '.join(map(str, late))} apply the changes when their WorkAgents have restarted", flush=True
        )
    return 0
