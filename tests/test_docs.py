"""What the documents name exists (files, headings, YAML keys, commands, flags), and their short commands run."""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import run as performance_run
from llm_serving.cli import main
from llm_serving.config import load_config
from llm_serving.config.loader import ACCEPTED_KEYS
from llm_serving.config.schema import SECTIONS, TABLES
from support.script_parsers import WrongCommandError, parser_of
from support.server_process import ONE_THREAD, RUN_DIR, free_ports

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "llm-serving" / "llm_serving"
DOCUMENTS = (
    ROOT / "README.md",
    *sorted(ROOT.glob("CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
)
WRITTEN = (*DOCUMENTS, *sorted((ROOT / "docs" / "deploy").iterdir()), *sorted((ROOT / "configs").glob("*.yaml")))
ROOTS = (ROOT, ROOT / "docs", ROOT / "llm-serving", PACKAGE)
"""Folders that paths in documents are relative to."""
FOLDERS = {path.name for root in ROOTS for path in root.iterdir() if path.is_dir()}
NAMES = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def text_of(document: Path) -> str:
    return document.read_text(encoding="utf-8")


@NAMES
def test_documents_start_with_their_purpose(document):
    title, blank, first = text_of(document).splitlines()[:3]
    assert title.startswith("# ")
    assert blank == ""
    assert re.match(r"\w|\[|`[^`]", first), "a sentence is wanted"


def test_first_page_of_the_documents_is_short():
    assert len(text_of(ROOT / "README.md").splitlines()) <= 120


# --- files and headings ---------------------------------------------------------------------------------------------


def paths_in(text: str) -> Iterator[str]:
    for path in re.findall(
        r"(?<![\w./~@{}-])(?:[\w-]+/)+[\w.-]*\w\.(?:py|sh|md|ya?ml|json|svg|png|conf|service|h|cc)\b", text
    ):
        if path.split("/")[0] in FOLDERS:
            yield path
    yield from re.findall(r"(?<![\w/])test_\w+\.py", text)


def exists(path: str) -> bool:
    if "/" not in path:
        return any((ROOT / "tests").rglob(path))
    return any((root / path).exists() for root in ROOTS)


@NAMES
def test_files_in_documents_exist(document):
    assert [path for path in paths_in(text_of(document)) if not exists(path)] == []


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@NAMES
def test_links_in_documents_have_targets(document):
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(document)):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = document.parent / name if name else document
        if not file.exists() or (anchor and anchor not in anchors(text_of(file))):
            wrong.append(target)
    assert wrong == []


def test_every_page_is_in_a_table_of_contents():
    docs = ROOT / "docs"
    contents = (docs / "README.md", docs / "results" / "README.md")
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in contents
        for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page))
    }
    assert [path for path in docs.rglob("*.md") if path not in contents and path not in linked] == []


# --- keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", WRITTEN, ids=lambda path: path.name)
def test_keys_in_documents_exist(document):
    text = text_of(document)
    keys = re.findall(rf"\b((?:{'|'.join(SECTIONS)})\.(?!ya?ml\b|json\b|py\b)\w+)", text)
    wrong = [key for key in keys if key not in ACCEPTED_KEYS]
    for section, row, key in re.findall(rf"\b({'|'.join(TABLES)})\.([\w-]+)\.(\w+)", text):
        if key not in TABLES[section].rules:
            wrong.append(f"{section}.{row}.{key}")
    assert wrong == []


# --- commands -------------------------------------------------------------------------------------------------------


def code_of(text: str) -> Iterator[str]:
    """Commands of blocks, each on one line, and what stands between backquotes."""
    for block in re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield from block.replace("\\\n", " ").splitlines()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose))


def choices_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def words_of(code: str) -> list[str]:
    code = re.sub(r"\s#\s.*$", "", code)
    try:
        return shlex.split(code)
    except ValueError:
        return code.split()


def wrong_in(words: list[str]) -> list[str]:
    """Return the unknown subcommands and flags of one of our command lines."""
    parser, wrong = main._parser(), []
    for word in words:
        choices = choices_of(parser)
        if choices and not word.startswith("-"):
            if word not in choices:
                return [word]
            parser = choices[word]
        elif word.startswith("--") and word.partition("=")[0] not in parser._option_string_actions:
            wrong.append(f"{parser.prog} {word}")
        elif word in ("|", "&&", "&", ";"):
            break
    return wrong


def own_commands(text: str) -> Iterator[list[str]]:
    for code in code_of(text):
        words = words_of(code)
        for index, word in enumerate(words):
            if word == "llm-serving" or word.endswith("/llm-serving"):
                yield words[index + 1 :]
                break
            if word.endswith("scripts/start.sh"):
                yield ["start", *(word for word in words[index + 1 :] if word != "--foreground")]
                break
            if word.endswith("scripts/stop.sh"):
                yield ["stop", *words[index + 1 :]]
                break


@NAMES
def test_commands_and_flags_in_documents_exist(document):
    wrong = [each for words in own_commands(text_of(document)) for each in wrong_in(words)]
    assert wrong == []


@NAMES
def test_commands_in_documents_can_be_pasted(document):
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text_of(document), re.MULTILINE | re.DOTALL)
    assert re.findall(r"^(?:llm-serving|python|pip|ray) .*", "".join(blocks), re.MULTILINE) == []


def test_extras_in_documents_are_installed_from_the_folder():
    sources = [path for folder in (PACKAGE, ROOT / "performance", ROOT / "scripts") for path in folder.rglob("*.py")]
    texts = {path: " ".join(text_of(path).split()) for path in (*WRITTEN, *sources)}
    assert [path for path, text in texts.items() if re.search(r"install '?llm-serving", text)] == []


# --- blocks of commands that run ------------------------------------------------------------------------------------

NEEDS = {
    "checkout": "it changes files of the working copy",
    "cluster": "several machines, or Ray",
    "minutes": "it takes more than a few seconds",
    "model": "a model of the reader's own",
    "network": "a hub, a package index or a download",
    "npu": "an Ascend device",
    "package": "a package that is not installed here",
    "root": "rights of the administrator",
}
"""Mark of a block of commands (```bash needs=MARK) that no test runs -> why. Blocks without a mark are run."""
SERVER_LINES = re.compile(r"^bash scripts/(?:start|stop)\.sh$", re.MULTILINE)
"""Commands that stand for the server which the test starts."""
ASKS_A_SERVER = re.compile(r"^(\S*llm-serving (?:chat|timeline|reload|advice|cluster (?:replicas|drain|join))\b)", re.M)
COMMAND = re.compile(
    r"^(?:bash|scripts/|curl|PYTHONPATH=|ulimit|\(umask|\S*\.venv/|python3?|\S*llm-serving |promtool|nginx) ?\S", re.M
)


class Block(NamedTuple):
    document: str
    needs: str | None
    text: str


def blocks_in(document: Path) -> Iterator[Block]:
    """The fenced blocks marked as bash."""
    for info, text in re.findall(r"^ *```bash([^\n]*)\n(.*?)^ *```", text_of(document), re.MULTILINE | re.DOTALL):
        yield Block(document.name, info.strip().removeprefix("needs=") or None, textwrap.dedent(text))


def error_in(done: subprocess.CompletedProcess[str], document: str) -> str | None:
    """Return the error that a server answered, if the document does not show it.

    A request that another command of the block started may have come too late to be found.
    """
    found = re.search(r'^\{"error":.*', done.stdout, re.MULTILINE)
    shown = found is None or found[0] in document or "request_not_found" in found[0]
    return None if shown else found[0]


@NAMES
def test_command_blocks_in_documents_are_marked(document):
    """A block with a command is marked as bash, and the test that would not run it says why."""
    blocks = re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", text_of(document), re.MULTILINE | re.DOTALL)
    commands = [text for language, text in blocks if language == "" and COMMAND.match(textwrap.dedent(text))]
    assert commands == []
    assert {block.needs for block in blocks_in(document)} <= {None, *NEEDS}


def quick_command(text: str) -> list[str] | None:
    """Return the arguments of a block that is one command of ours without pipes and model; None: it is another one."""
    line = text.replace("\\\n", " ").strip()
    quick = re.fullmatch(r"\S*/llm-serving ((?:config|models|timeline|reload|whatif) [^\n|&;<>$]*|models\s+#.*)", line)
    return None if quick is None else words_of(quick[1])


def run_here(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which saves the start of an interpreter."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main.main(words)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def write_shorter_loads(top: Path) -> None:
    """Write the folder `performance`, whose workloads have a tenth of the requests."""
    folder = top / "performance"
    (folder / "loads").mkdir(parents=True)
    for path in (ROOT / "performance").iterdir():
        if path.name != "loads":
            (folder / path.name).symlink_to(path)
    for path in (ROOT / "performance" / "loads").iterdir():
        text, count = re.subn(r"requests: (\d+)0\b", r"requests: \1", path.read_text())
        assert count > 0, path
        (folder / "loads" / path.name).write_text(text)


def test_command_blocks_in_documents_run(tmp_path, monkeypatch):
    """Every unmarked block succeeds, in a copy of the top folder, against one server with the shipped model."""
    (port,) = free_ports(1)
    for path in ROOT.iterdir():
        if path.name not in (".venv", "performance"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    write_shorter_loads(tmp_path)
    monkeypatch.chdir(tmp_path)
    environment = dict(os.environ, LLM_SERVING_VENV=sys.prefix, LLM_SERVING_RUN_DIR=str(RUN_DIR))
    url = f"--url http://127.0.0.1:{port}"

    def run(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", text],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=240,
        )

    recorded = f"--set scheduler_config.record_path={tmp_path / 'recordings'}"
    started = run(
        f"bash scripts/start.sh --port {port} --set {ONE_THREAD} --set serving_config.resume_streams=True {recorded}"
    )
    assert started.returncode == 0, started.stderr
    failed = []
    try:
        for document in DOCUMENTS:
            for block in blocks_in(document):
                if block.needs is None:
                    text = SERVER_LINES.sub("true", block.text).replace("8835", str(port))
                    text = ASKS_A_SERVER.sub(rf"\1 {url}", text)
                    done = run(text) if (words := quick_command(text)) is None else run_here(words)
                    if done.returncode or error_in(done, text_of(document)):
                        failed.append((block.document, block.text, done.stdout[-500:], done.stderr[-500:]))
    finally:
        run(f"bash scripts/stop.sh --port {port}")
    assert failed == []


@NAMES
def test_yaml_and_python_of_documents_are_valid(document, tmp_path):
    """A YAML block with sections of the configuration loads; a Python block compiles."""
    blocks = re.findall(r"^ *```(yaml|python)\n(.*?)^ *```", text_of(document), re.MULTILINE | re.DOTALL)
    for language, indented in blocks:
        text = textwrap.dedent(indented)
        if language == "python":
            compile(text, document.name, "exec")
        elif set(re.findall(r"^(\w+):", text, re.MULTILINE)) <= {*SECTIONS, *TABLES}:
            (tmp_path / "part.yaml").write_text(text)
            load_config(tmp_path / "part.yaml", [])


# --- scripts --------------------------------------------------------------------------------------------------------

RUNS = {
    "scripts/acceptance.sh": "tests/acceptance/run.py",
    "scripts/acceptance.sh --real": "tests/acceptance/real/run.py",
    "scripts/ascend_acceptance.sh": "tests/acceptance/device/run.py",
}
"""Script, with a first argument that chooses another one -> the script that gets its arguments."""
BENCHMARKS = {
    name: (ROOT / "performance").joinpath(*module.split(".")).with_suffix(".py")
    for name, module in performance_run.benchmarks()
}
"""Name -> the file that `performance/run.py NAME` runs."""
SCRIPTS = tuple(path for name in ("performance", "tests", "scripts") for path in sorted((ROOT / name).rglob("*.py")))


def description_of(path: Path) -> str:
    """Return a script's docstring or head comment."""
    text = text_of(path)
    return ast.get_docstring(ast.parse(text)) or "" if "argparse" in text else ""


def lines_of_usage(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if (found := re.search(r"(?:^    |: )((?:PYTHONPATH=\S+ )?(?:\S*python3?|scripts/\S+) .*)", line)) is not None:
            yield re.split(r"   |`", found[1])[0]


def script_in(words: list[str], folder: Path) -> tuple[Path, list[str]] | None:
    """Return the script of a command line and its arguments."""
    for index, word in enumerate(words):
        module = ROOT / "tests" / f"{word.replace('.', '/')}.py"
        if index and words[index - 1] == "-m" and module.is_file():
            return module, words[index + 1 :]
        if word in RUNS:
            own = [each for each in words[index + 1 :] if f"= {each} " not in text_of(ROOT / word)]
            return ROOT / RUNS.get(" ".join(words[index : index + 2]), RUNS[word]), own
        if word.endswith("performance/run.py") and len(words) > index + 1 and words[index + 1] in BENCHMARKS:
            return BENCHMARKS[words[index + 1]], words[index + 2 :]
        if word.endswith(".py"):
            for root in (ROOT, folder, ROOT / "performance"):
                if (root / word).is_file():
                    return root / word, words[index + 1 :]
    return None


def wrong_for_its_script(code: str, folder: Path = ROOT) -> str | None:
    """Return why the script of a command line refuses it; None if it accepts it, or there is no script."""
    if (found := script_in(words_of(code), folder)) is None or (parser := parser_of(found[0])) is None:
        return None
    arguments = list(itertools.takewhile(lambda word: word not in ("|", "&&", "&", ">"), found[1]))
    written = (word.strip("[],").partition("|")[0] for word in arguments if word.strip("[],.") or word == ".")
    try:
        parser.parse_args(list(written))
    except WrongCommandError as error:
        return f"{code}: {error}"
    return None


@NAMES
def test_script_options_in_documents_exist(document):
    assert [wrong for code in code_of(text_of(document)) if (wrong := wrong_for_its_script(code)) is not None] == []


def test_script_options_in_docstrings_exist():
    lines = ((line, path.parent) for path in SCRIPTS for line in lines_of_usage(description_of(path)))
    assert [wrong for line, folder in lines if (wrong := wrong_for_its_script(line, folder)) is not None] == []


def test_errors_in_documents_are_detected():
    text = "`engine/nowhere.py`, `performance/nowhere.py`, `test_nowhere.py`, `engine/engine.py`, `my/own.yaml`"
    assert [path for path in paths_in(text) if not exists(path)] == [
        "engine/nowhere.py",
        "performance/nowhere.py",
        "test_nowhere.py",
    ]
    text = (
        "`llm-serving serv`\n\n```\nbash scripts/start.sh --port 1 --ports 2\n.venv/bin/llm-serving config chek\n```\n"
    )
    wrong = [each for words in own_commands(text) for each in wrong_in(words)]
    assert sorted(wrong) == ["chek", "llm-serving start --ports", "serv"]
    line = "python performance/run.py make_model 15m FOLDER --position 4"
    assert wrong_for_its_script(line) == f"{line}: unrecognized arguments: --position 4"
    assert wrong_for_its_script(line.replace("--position", "--positions")) is None
