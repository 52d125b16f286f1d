"""Run real clients, each in an environment of its own from the package index, against a running server.

    scripts/acceptance.sh                                   start a server with the shipped model, run all clients
    scripts/acceptance.sh openai anthropic                  run only these
    python tests/acceptance/run.py --url URL --model NAME   use another server

`--golden` stores the requests of each client, which quick tests send to a fake engine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
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
"""Timeout of creating an environment; several clients install hundreds of MB."""
TIMEOUT_S: Final = 900.0
"""Timeout of all checks of a client."""
CONSTRAINTS: Final = ("torch==2.13.0",)
"""Versions of packages that clients depend on: later versions of torch install several GB of CUDA libraries."""
LAST_LINES: Final = 3


class Client(NamedTuple):
    """A package of the Python index, which `clients/use_NAME.py` uses, or of npm, which `clients/use_NAME.mjs` uses."""

    name: str
    packages: tuple[str, ...]
    only_by_name: bool = False
    """Whether it is skipped if no clients are named and it has no environment yet."""

    @property
    def script(self) -> str:
        return f"use_{self.name}.{'mjs' if self.name.startswith('npm_') else 'py'}"


CLIENTS: Final = (
    Client("openai", ("openai",)),
    Client("anthropic", ("anthropic",)),
    Client("langchain_openai", ("langchain-openai",)),
    Client("litellm", ("litellm", "mcp")),  # its responses need the other package
    Client("huggingface_hub", ("huggingface_hub",)),
    Client("text_generation", ("text-generation",)),
    Client("llama_index", ("llama-index-llms-openai-like", "llama-index-embeddings-openai-like")),
    Client("instructor", ("instructor",)),
    Client("pydantic_ai", ("pydantic-ai-slim[openai]",)),
    Client("openai_agents", ("openai-agents",)),
    Client("lm_eval", ("lm-eval[api]",)),
    Client("guidellm", ("guidellm",)),  # depends on torch
    Client("aiperf", ("aiperf",)),
    Client("vllm", ("vllm",), only_by_name=True),  # depends on several GB of CUDA libraries
    # Later versions need a later Node.js than 20.
    Client("npm_openai", ("openai@6",)),
    Client("npm_ai_sdk", ("ai@5", "@ai-sdk/openai-compatible@1", "@ai-sdk/openai@2", "@ai-sdk/anthropic@2", "zod@4")),
    Client("npm_langchain", ("@langchain/openai@1", "@langchain/core@1")),
)


class Result(NamedTuple):
    client: str
    version: str
    what: str
    error: str
    excused: bool = False
    """Whether the error is a fault of the client with every server."""


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
        is_installed = not client.only_by_name or (arguments.envs / client.name).exists()
        if client.name in arguments.names or (is_installed and not arguments.names):
            print(f"{client.name} ...", file=sys.stderr, flush=True)
            try:
                results += run(client, arguments)
            except Exception as error:  # noqa: BLE001  after any error of one client the others run
                results.append(Result(client.name, "?", "all", f"{type(error).__name__}: {error}"))
    print(table(results))
    return int(any(each.error and not each.excused for each in results))


def run(client: Client, arguments: argparse.Namespace) -> list[Result]:
    folder = arguments.envs.resolve() / client.name
    try:
        command = npm_environment(folder, client) if client.script.endswith(".mjs") else environment(folder, client)
    except (OSError, subprocess.SubprocessError) as error:
        return [Result(client.name, "?", "installation", str(error))]
    address = urlsplit(arguments.url)
    with recording(address.hostname or "127.0.0.1", address.port or 80) as recorder:
        given = {"ACCEPTANCE_URL": recorder.url, "ACCEPTANCE_MODEL": arguments.model, "PATH": os.environ["PATH"]}
        given |= {"HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "NO_PROXY": "*"}
        given |= {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none"}
        ended = call(command, TIMEOUT_S, given, folder)
    lines = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{") and line.endswith("}")]
    version = next((each["version"] for each in lines if "version" in each), "?")
    results = [
        Result(client.name, version, each["what"], each["error"], each["excused"]) for each in lines if "what" in each
    ]
    if ended.error or not results:
        results.append(Result(client.name, version, "its file", ended.error or "tries nothing"))
    if arguments.golden:
        keep(client.name, version, recorder.asked)
    return results


def environment(folder: Path, client: Client) -> list[str]:
    """Return the command that runs the client in an environment with its packages.

    Raises:
        SubprocessError: Installing fails.
    """
    python, done = folder / "bin" / "python", folder / "done"
    command = [str(python), str(HERE / "clients" / client.script)]
    if python.exists() and not done.exists() and folder.is_symlink():
        return command  # an existing environment of the user, which is not changed
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        constraints = folder / "constraints.txt"
        constraints.write_text("".join(f"{each}\n" for each in CONSTRAINTS))
        pip = (str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", str(constraints))
        ended = call([*pip, *client.packages], INSTALLATION_TIMEOUT_S)
        if ended.error:
            raise subprocess.SubprocessError(ended.error)
        done.touch()
    return command


def npm_environment(folder: Path, client: Client) -> list[str]:
    """As `environment`, for a client of npm. Modules are found beside the script, so it is copied into the folder."""
    done = folder / "done"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        npm = ("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder))
        ended = call([*npm, *client.packages], INSTALLATION_TIMEOUT_S)
        if ended.error:
            raise subprocess.SubprocessError(ended.error)
        done.touch()
    for name in ("checking.mjs", client.script):
        shutil.copyfile(HERE / "clients" / name, folder / name)
    return ["node", client.script]


class Ended(NamedTuple):
    """The output of a program, and its error if it failed."""

    out: str
    error: str


def call(
    command: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None, folder: Path | None = None
) -> Ended:
    """Run a program in a folder; after `timeout_s` seconds kill it with all its children."""
    with (
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as errors,
    ):
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=out, stderr=errors, start_new_session=True)
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
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read())
    last = " / ".join(line.strip() for line in texts[1].strip().splitlines()[-LAST_LINES:])
    return Ended(texts[0], how and f"{how}: {last or 'no output'}")


def keep(name: str, version: str, asked: list[dict[str, Any]]) -> None:
    """Store the responses that can be requested again, without the ids of this run."""
    requests = []
    for each in asked:
        is_repeatable = each["method"] == "POST" and "previous_response_id" not in each["body"]
        if is_repeatable and each["status"] == HTTPStatus.OK and each not in requests:
            requests.append(each)
    GOLDEN.mkdir(exist_ok=True)
    content = {"client": name, "version": version, "requests": requests}
    (GOLDEN / f"{name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def table(results: list[Result]) -> str:
    lines = ["| client | version | what ran | result |", "| --- | --- | --- | --- |"]
    for each in results:
        error = ("the client's own fault: " if each.excused else "") + " ".join(each.error.split()).replace("|", "\\|")
        lines.append(f"| {each.client} | {each.version} | {each.what} | {error or 'ok'} |")
    count, excused = sum(not each.error for each in results), sum(each.excused for each in results)
    at_fault = f", {excused} not, by the client's own fault" if excused else ""
    return "\n".join([*lines, "", f"{count} of {len(results)} ran{at_fault}"])


if __name__ == "__main__":
    sys.exit(main())
