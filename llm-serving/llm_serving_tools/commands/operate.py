"""Commands that call a running server over HTTP, with the standard library only: `cluster`, `reload` and `timeline`."""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse, InvalidURL
from pathlib import Path
from typing import Final

from llm_serving.cli.arguments import Subcommands, add_command, add_server_arguments, api_key_of, url_of
from llm_serving.errors import ConfigError, LLMServingError, UnavailableError, shorten

KEY_HELP: Final = "an administrator's; "
TIMEOUT_S: Final = 600.0
"""Maximum seconds between two bytes of a response. The limit is high because a request may wait in the queue."""
MAX_ERROR_BYTES: Final = 4096


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "cluster", help="show a cluster, drain replicas and let drained replicas join again", allow_abbrev=False
    )
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    status = add_command(
        subcommands, "status", run_status, "show the machines of a Ray cluster, their free resources and WorkAgents"
    )
    status.add_argument(
        "--address", default="auto", help="address as in cluster_config.address; default: a cluster on this machine"
    )
    replicas = add_command(subcommands, "replicas", run_replicas, "show the state of each replica of a server")
    add_server_arguments(replicas, KEY_HELP)
    replicas.set_defaults(order=None)
    for order, what in (
        ("drain", "let a replica finish its requests and leave"),
        ("join", "let a drained replica serve again"),
    ):
        of_one = add_command(subcommands, order, run_replicas, what)
        of_one.add_argument(
            "replica", type=int, metavar="N", help="number of the replica, as `cluster replicas` shows it"
        )
        add_server_arguments(of_one, KEY_HELP)
        of_one.set_defaults(order=order)
    reload = add_command(
        commands,
        "reload",
        run_reload,
        "make a running server read its YAML again: limits, keys, classes, policy and budgets",
    )
    add_server_arguments(reload, KEY_HELP)
    timeline = add_command(
        commands, "timeline", run_timeline, "save the newest steps of a running server as a trace for ui.perfetto.dev"
    )
    add_server_arguments(timeline)
    timeline.add_argument("--output", type=Path, default=Path("trace.json"), metavar="FILE", help="default: trace.json")
    timeline.add_argument("--steps", type=int, metavar="N", help="only the newest N steps")


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


def run_timeline(arguments: argparse.Namespace) -> int:
    url, output = url_of(arguments), arguments.output
    query = "" if arguments.steps is None else f"?steps={arguments.steps}"
    with opened(url, f"/v1/timeline{query}", api_key_of(arguments)) as answer:
        content = answer.read()
    try:
        events = json.loads(content)["traceEvents"]
        output.write_bytes(content)
    except (ValueError, KeyError, TypeError):
        raise LLMServingError(f"{url} sent a response that is not a trace") from None
    except OSError as error:
        raise ConfigError(f"{output}: {error.strerror or error}") from None
    print(f"{output}: {len(events)} events; open it at https://ui.perfetto.dev")
    return 0


class ServerRefusal(LLMServingError):  # noqa: N818  an answer, not an error of this program
    """The server refused the request."""


@contextmanager
def opened(
    url: str, path: str, key: str = "", body: object = None, method: str | None = None
) -> Iterator[HTTPResponse]:
    """Send a request and yield the response. Raise ConfigError if the URL or the key is invalid, ServerRefusal if the
    status is an error, UnavailableError if the connection fails.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must begin with http:// or https://. Given: {url}")
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            "an API key must consist of printable ASCII characters; this one has other characters, perhaps a line break"
        )
    try:
        with _sent(url, path, data, headers, method) as response:
            yield response
    except urllib.error.HTTPError as error:
        raise ServerRefusal(_error_message(error.code, error.read(MAX_ERROR_BYTES))) from None
    except urllib.error.URLError as error:
        raise UnavailableError(f"no server answers at {url}: {error.reason}") from None
    except (OSError, HTTPException) as error:
        raise UnavailableError(f"the connection to {url} broke: {error or type(error).__name__}") from None


def _sent(url: str, path: str, data: bytes | None, headers: dict[str, str], method: str | None) -> HTTPResponse:
    try:
        request = urllib.request.Request(url.rstrip("/") + path, data, headers, method=method)  # noqa: S310  checked
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)  # noqa: S310
    except (InvalidURL, ValueError) as error:
        raise ConfigError(f"--url must be the address of a server: {error}. Given: {url!r}") from None
    return answer


def _error_message(status: int, content: bytes) -> str:
    try:
        return f"{status}: {json.loads(content)['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return f"{status}: {shorten(content.decode('utf-8', 'replace'))}"
