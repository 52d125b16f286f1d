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
import subprocess
import sys
import venv
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from recorder import recording

HERE: Final = Path(__file__).parent
GOLDEN: Final = HERE.parent / "server" / "golden"
TIMEOUT_S: Final = 900.0


class Client(NamedTuple):
    """A package of the index; `clients/use_NAME.py` uses it."""

    name: str
    packages: tuple[str, ...]
    only_by_name: bool = False
    """Whether it is left out where no clients are named."""


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
        if client.name in arguments.names or not (arguments.names or client.only_by_name):
            print(f"{client.name} ...", file=sys.stderr, flush=True)
            results += run(client, arguments)
    print(table(results))
    return int(any(each.error for each in results))


def run(client: Client, arguments: argparse.Namespace) -> list[Result]:
    """What came of all that a client's file tries."""
    try:
        python = environment(arguments.envs.resolve() / client.name, client.packages)
    except subprocess.CalledProcessError as error:
        return [Result(client.name, "?", "installation", f"pip ends with {error.returncode}")]
    address = urlsplit(arguments.url)
    with recording(address.hostname or "127.0.0.1", address.port or 80) as recorder:
        given = {"ACCEPTANCE_URL": recorder.url, "ACCEPTANCE_MODEL": arguments.model, "PATH": os.environ["PATH"]}
        given |= {"HOME": str(python.parents[1]), "PYTHONDONTWRITEBYTECODE": "1", "NO_PROXY": "*"}
        given |= {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none"}
        script = HERE / "clients" / f"use_{client.name}.py"
        try:
            done = subprocess.run([python, script], env=given, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return [Result(client.name, "?", "all", f"took longer than {TIMEOUT_S:.0f} s")]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    version = next((each["version"] for each in told if "version" in each), "?")
    results = [Result(client.name, version, each["what"], each["error"]) for each in told if "what" in each]
    if done.returncode or not results:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        results.append(Result(client.name, version, "its file", f"ends with {done.returncode}: {last}"))
    if arguments.golden:
        keep(client.name, version, recorder.asked)
    return results


def environment(folder: Path, packages: tuple[str, ...]) -> Path:
    """The interpreter of an environment that has these packages."""
    python, done = folder / "bin" / "python", folder / "done"
    if python.exists() and not done.exists() and folder.is_symlink():
        return python  # of somebody else: used as it is, neither emptied nor added to
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages], check=True)
        done.touch()
    return python


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
        error = each.error.replace("|", "\\|")
        lines.append(f"| {each.client} | {each.version} | {each.what} | {error or 'ok'} |")
    count = sum(not each.error for each in results)
    return "\n".join([*lines, "", f"{count} of {len(results)} ran"])


if __name__ == "__main__":
    sys.exit(main())
