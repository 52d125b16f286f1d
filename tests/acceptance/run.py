"""Runs real clients against a server that runs already, each in an environment of its own made from the package index.

    scripts/acceptance.sh                                   starts a server of the shipped model, runs all of them
    scripts/acceptance.sh openai anthropic                  these alone
    python tests/acceptance/run.py --url URL --model NAME   against a server of yours

What each client sends can be kept (`--golden`): the quick tests send it again to an engine that only pretends.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]

from acceptance.recorder import recording

HERE: Final = Path(__file__).parent
GOLDEN: Final = HERE.parent / "server" / "golden"
INSTALLATION_TIMEOUT_S: Final = 1200.0
"""Of an environment; several of the clients bring hundreds of MB along."""
TIMEOUT_S: Final = 900.0
"""Of all that a client's file tries."""
CONSTRAINTS: Final = ("torch==2.13.0",)
"""Versions of packages that clients may bring along: later ones of torch come with several GB of CUDA's libraries."""
LAST_LINES: Final = 3


class Client(NamedTuple):
    """A package of the index; `clients/use_NAME.py` uses it."""

    name: str
    packages: tuple[str, ...]
    only_by_name: bool = False
    """Whether it is left out where no clients are named and it has no environment yet."""


CLIENTS: Final = (
    Client("openai", ("openai",)),
    Client("anthropic", ("anthropic",)),
    Client("langchain_openai", ("langchain-openai",)),
    Client("litellm", ("litellm", "mcp")),  # its responses import the other
    Client("huggingface_hub", ("huggingface_hub",)),
    Client("text_generation", ("text-generation",)),
    Client("llama_index", ("llama-index-llms-openai-like", "llama-index-embeddings-openai-like")),
    Client("instructor", ("instructor",)),
    Client("pydantic_ai", ("pydantic-ai-slim[openai]",)),
    Client("openai_agents", ("openai-agents",)),
    Client("lm_eval", ("lm-eval[api]",)),
    Client("guidellm", ("guidellm",)),  # brings torch along
    Client("aiperf", ("aiperf",)),
    Client("vllm", ("vllm",), only_by_name=True),  # brings CUDA's libraries along, several GB
)


class Result(NamedTuple):
    client: str
    version: str
    what: str
    error: str
    excused: bool = False
    """Whether the error is one that the client makes with every server."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CLIENT", help=", ".join(each.name for each in CLIENTS))
    parser.add_argument("--url", default="http://127.0.0.1:8835")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--envs", type=Path, default=Path(".acceptance"), help="folder of the environments; they stay")
    parser.add_argument("--golden", action="store_true", help=f"keep what is sent in {GOLDEN}")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {each.name for each in CLIENTS}
    if unknown:
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    results = []
    for client in CLIENTS:
        is_there = not client.only_by_name or (arguments.envs / client.name).exists()
        if client.name in arguments.names or (is_there and not arguments.names):
            print(f"{client.name} ...", file=sys.stderr, flush=True)
            try:
                results += run(client, arguments)
            except Exception as error:  # noqa: BLE001  whatever comes of one client, the others run
                results.append(Result(client.name, "?", "all", f"{type(error).__name__}: {error}"))
    print(table(results))
    return int(any(each.error and not each.excused for each in results))


def run(client: Client, arguments: argparse.Namespace) -> list[Result]:
    """What came of all that a client's file tries."""
    try:
        python = environment(arguments.envs.resolve() / client.name, client.packages)
    except (OSError, subprocess.SubprocessError) as error:
        return [Result(client.name, "?", "installation", str(error))]
    address = urlsplit(arguments.url)
    with recording(address.hostname or "127.0.0.1", address.port or 80) as recorder:
        given = {"ACCEPTANCE_URL": recorder.url, "ACCEPTANCE_MODEL": arguments.model, "PATH": os.environ["PATH"]}
        given |= {"HOME": str(python.parents[1]), "PYTHONDONTWRITEBYTECODE": "1", "NO_PROXY": "*"}
        given |= {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none"}
        script = HERE / "clients" / f"use_{client.name}.py"
        ended = call([str(python), str(script)], TIMEOUT_S, given)
    told = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{") and line.endswith("}")]
    version = next((each["version"] for each in told if "version" in each), "?")
    results = [
        Result(client.name, version, each["what"], each["error"], each["excused"]) for each in told if "what" in each
    ]
    if ended.error or not results:
        results.append(Result(client.name, version, "its file", ended.error or "tries nothing"))
    if arguments.golden:
        keep(client.name, version, recorder.asked)
    return results


def environment(folder: Path, packages: tuple[str, ...]) -> Path:
    """The interpreter of an environment that has these packages; a failed installation is a `SubprocessError`."""
    python, done = folder / "bin" / "python", folder / "done"
    if python.exists() and not done.exists() and folder.is_symlink():
        return python  # of somebody else: used as it is, neither emptied nor added to
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        constraints = folder / "constraints.txt"
        constraints.write_text("".join(f"{each}\n" for each in CONSTRAINTS))
        pip = (str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", str(constraints))
        ended = call([*pip, *packages], INSTALLATION_TIMEOUT_S)
        if ended.error:
            raise subprocess.SubprocessError(ended.error)
        done.touch()
    return python


class Ended(NamedTuple):
    """What a program wrote, and how it ended where it did not end well."""

    out: str
    error: str


def call(command: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> Ended:
    """Runs a program; past `timeout_s` seconds it ends with all that it started."""
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=said, start_new_session=True)
        how = ""
        try:
            if process.wait(timeout_s):
                how = f"ends with {process.returncode}"
        except subprocess.TimeoutExpired:
            how = f"took longer than {timeout_s:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        texts = []
        for file in (out, said):
            file.seek(0)
            texts.append(file.read())
    last = " / ".join(line.strip() for line in texts[1].strip().splitlines()[-LAST_LINES:])
    return Ended(texts[0], how and f"{how}: {last or 'no output'}")


def keep(name: str, version: str, asked: list[dict[str, Any]]) -> None:
    """Writes what was answered and can be asked again: not by the ids of an earlier run."""
    requests = []
    for each in asked:
        is_alone = each["method"] == "POST" and "previous_response_id" not in each["body"]
        if is_alone and each["status"] == HTTPStatus.OK and each not in requests:
            requests.append(each)
    GOLDEN.mkdir(exist_ok=True)
    content = {"client": name, "version": version, "requests": requests}
    (GOLDEN / f"{name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def table(results: list[Result]) -> str:
    """For people, in the form of documents."""
    lines = ["| client | version | what ran | result |", "| --- | --- | --- | --- |"]
    for each in results:
        error = ("the client's own fault: " if each.excused else "") + " ".join(each.error.split()).replace("|", "\\|")
        lines.append(f"| {each.client} | {each.version} | {each.what} | {error or 'ok'} |")
    count, excused = sum(not each.error for each in results), sum(each.excused for each in results)
    at_fault = f", {excused} not, by the client's own fault" if excused else ""
    return "\n".join([*lines, "", f"{count} of {len(results)} ran{at_fault}"])


if __name__ == "__main__":
    sys.exit(main())
