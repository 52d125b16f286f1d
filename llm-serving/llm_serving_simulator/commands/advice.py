"""`llm-serving advice`: ask a running server which other values of its keys would have been better."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from llm_serving.cli.arguments import say
from llm_serving_tools.server_client import ADMINISTRATOR_KEY, add_server_arguments, call


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=int, default=5, metavar="N", help="that are simulated; default 5")
    add_server_arguments(parser, ADMINISTRATOR_KEY)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    say("simulating the last minutes; this takes up to four minutes")
    path = f"/v1/scheduler/advice?minutes={arguments.minutes}"
    print("\n".join(call(arguments, path, lambda advice: list(described(advice)))), flush=True)
    return 0


def described(advice: Mapping[str, Any]) -> Iterable[str]:
    """Return the advice of the route in lines."""
    refused = f" ({advice['refused']:,} of them refused)" if advice["refused"] else ""
    yield (
        f"{advice['requests']:,} requests{refused} of {advice['seconds']:.0f} s, {advice['played']} other values of the"
        f" YAML's keys played ({advice['not_played']} were not); times of steps are off by {advice['step_error']:.0%}"
        f" at the median"
    )
    for title, found in (("better:", advice["advised"]), ("better and worse:", advice["otherwise"])):
        if found:
            yield title
        for each in found:
            restart = "; takes a restart" if each["needs_restart"] else ""
            yield f"  {each['line']}    # {each['key']} is {each['was']} ({each['source']}){restart}"
            for sign, changes in (("+", each["better"]), ("-", each["worse"])):
                for change in changes:
                    yield f"    {sign} {change['figure']} {change['was']} -> {change['would_be']}"
            if each["beyond"]:
                yield f"    {each['beyond']}"
    if not advice["played"]:
        yield "there was no time for any simulation: repeat it when the server is less busy, or with fewer --minutes"
    elif not advice["advised"] and not advice["otherwise"]:
        yield "no neighbouring value would have been better"
