"""The import direction of the package: rows from below, two columns that never meet, and no MindSpore in the master.

```
        MASTER                                 WORK AGENT
8                    offline < cli                      (the terminal starts the master)
7   master                                 work_agent
6   server                                 worker
5   engine                                 lowering
4   admission, executor -> observability, text
3   recording -> scheduler                 backends -> kernels
2   kvcache
1            transport
0            errors < log < core < network < models < hub < config
```

Imports are read from the source, so those inside functions and under TYPE_CHECKING count too.

The packages `llm_serving_simulator`, `llm_serving_receipts` and `llm_serving_tools` stand beside this one: they import
`llm_serving`, which never imports them. It loads their modules by name when they are needed.
"""

import ast
import re
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

PROJECT = Path(__file__).resolve().parents[1]
PACKAGE = PROJECT / "llm-serving" / "llm_serving"
NAME = "llm_serving"
SIMULATOR = PROJECT / "llm-serving" / "llm_serving_simulator"
RECEIPTS = PROJECT / "llm-serving" / "llm_serving_receipts"
TOOLS = PROJECT / "llm-serving" / "llm_serving_tools"


class Layer(NamedTuple):
    """Layer of a part: it may import lower rows of its own column and of `both`."""

    row: float
    column: str


BOTH, MASTER, WORKER, TOP = "both", "master", "worker", "top"
LAYERS = {
    "errors": Layer(0.0, BOTH),
    "demo_model": Layer(0.0, BOTH),
    "log": Layer(0.1, BOTH),
    "core": Layer(0.2, BOTH),
    "formats": Layer(0.24, BOTH),
    "network": Layer(0.25, BOTH),
    "models": Layer(0.3, BOTH),
    "hub": Layer(0.35, BOTH),
    "config": Layer(0.4, BOTH),
    "transport": Layer(1, BOTH),
    "kvcache": Layer(2, MASTER),
    "scheduler": Layer(3.0, MASTER),
    "recording": Layer(3.1, MASTER),
    "text": Layer(4.0, MASTER),
    "observability": Layer(4.0, MASTER),
    "executor": Layer(4.05, MASTER),
    "admission": Layer(4.1, MASTER),
    "speculation": Layer(4.1, MASTER),
    "engine": Layer(5, MASTER),
    "server": Layer(6, MASTER),
    "master": Layer(7, MASTER),
    "kernels": Layer(3.0, WORKER),
    "backends": Layer(3.1, WORKER),
    "lowering": Layer(5, WORKER),
    "worker": Layer(6, WORKER),
    "work_agent": Layer(7, WORKER),
    "offline": Layer(8, TOP),
    "cli": Layer(8.05, TOP),
    "__main__": Layer(8.2, TOP),
}
LEAVES = {"kernels": {"errors", "log"}, "demo_model": set()}
"""Parts that may import only the listed parts, whatever their row."""

NO_MINDSPORE_ANYWHERE = {part for part, layer in LAYERS.items() if layer.column in (BOTH, MASTER)} | {"kernels"}
MEASURE_IN_PROCESS = {"benchmarks", "harness"}
"""Folders of performance/ that import the package; the other folders contain clients of a running server."""
UNSAFE = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}


class Import(NamedTuple):
    module: str
    line: int
    at_top: bool
    """Return whether a node runs when the file is imported, not only inside a function."""


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache  # cached like the functions below, because every test needs the imports of all files
def exists(module: str, root: Path) -> bool:
    path = root.parent.joinpath(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


@cache
def imports_of(path: Path, root: Path) -> list[Import]:
    """Return every module that a file imports, most specific: `from a import b` is `a.b` if that is a module."""
    tree = ast.parse(path.read_text(), str(path))
    package = module_name(path, root).split(".")
    if path.name != "__init__.py":
        package.pop()
    found: list[Import] = []

    def visit(node: ast.AST, at_top: bool) -> None:
        for module in modules_named(node, package, root):
            found.append(Import(module, node.lineno, at_top))
        inside = at_top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(tree, True)
    return found


def modules_named(node: ast.AST, package: list[str], root: Path) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            base = package[: len(package) - level + 1] if level else []
            full = ".".join(base + ([module] if module else []))
            for alias in names:
                inner = f"{full}.{alias.name}"
                yield inner if full.split(".")[0] == root.name and exists(inner, root) else full
        case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__")):
            if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                yield node.args[0].value


def part_of(module: str, root: Path) -> str | None:
    """Return the part of the package that contains a module; None outside the package and for the package itself."""
    names = module.split(".")
    return names[1] if names[0] == root.name and len(names) > 1 and exists(".".join(names[:2]), root) else None


def may_import(importer: str, imported: str) -> bool:
    if importer == imported:
        return True
    if importer in LEAVES:
        return imported in LEAVES[importer]
    own, other = LAYERS[importer], LAYERS[imported]
    return other.row < own.row and (other.column in (own.column, BOTH) or own.column == TOP)


@cache
def imports_by_module(root: Path) -> dict[str, list[Import]]:
    return {module_name(path, root): imports_of(path, root) for path in sources(root)}


def sources(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py"))


def direction_violations(root: Path) -> list[str]:
    result = []
    for path in sources(root):
        importer = part_of(module_name(path, root), root)
        for found in imports_of(path, root):
            imported = part_of(found.module, root)
            if imported is None:
                continue
            if importer is None or not may_import(importer, imported):
                result.append(f"{path.relative_to(root)}:{found.line} imports {found.module}")
    return result


def reaches(root: Path, start: str, target: str, at_top_only: bool = False) -> list[str]:
    """Return a chain of imports from module `start` to the foreign package `target`; empty if there is none."""
    graph = imports_by_module(root)
    chains = {start: [start]}
    waiting = [start]
    while waiting:
        module = waiting.pop()
        for found in graph.get(module, []):
            if at_top_only and not found.at_top:
                continue
            if found.module.split(".")[0] == target:
                return [*chains[module], found.module]
            # Importing a.b.c runs a and a.b as well.
            names = found.module.split(".")
            for inner in (".".join(names[: end + 1]) for end in range(len(names))):
                if inner in graph and inner not in chains:
                    chains[inner] = [*chains[module], inner]
                    waiting.append(inner)
    return []


# The package


def test_every_package_has_an_import_layer():
    parts = {part_of(module_name(path, PACKAGE), PACKAGE) for path in sources(PACKAGE)} - {None}
    assert parts - set(LAYERS) == set()


def test_files_import_only_from_rows_below_in_their_column():
    assert direction_violations(PACKAGE) == []


@pytest.mark.parametrize("part", sorted(NO_MINDSPORE_ANYWHERE))
def test_part_never_reaches_mindspore(part):
    starts = [name for path in sources(PACKAGE) if part_of(name := module_name(path, PACKAGE), PACKAGE) == part]
    assert [chain for start in starts if (chain := reaches(PACKAGE, start, "mindspore"))] == []


@pytest.mark.parametrize("module", ["block_guard", "kv_transfer", "model_inputs"])
def test_modules_of_the_worker_that_fake_runners_use_never_reach_mindspore(module):
    """Tests start dozens of WorkAgents with a fake model; each would take seconds to import it."""
    assert reaches(PACKAGE, f"{NAME}.worker.{module}", "mindspore") == []


@pytest.mark.parametrize("package", ["mindspore", "starlette", "uvicorn"])
def test_command_line_imports_neither_worker_nor_server_at_start(package):
    assert reaches(PACKAGE, f"{NAME}.cli.main", package, at_top_only=True) == []


@pytest.mark.parametrize("package", [SIMULATOR, RECEIPTS, TOOLS], ids=lambda path: path.name)
def test_server_imports_no_package_beside_it(package):
    found = [each.module for path in sources(PACKAGE) for each in imports_of(path, PACKAGE)]
    assert [module for module in found if module.split(".")[0] == package.name] == []


def test_receipt_issuer_imports_no_computing_part():
    """The issuer runs in the master, so it must not import MindSpore, the WorkAgent or a command."""
    issuing = [RECEIPTS / f"{name}.py" for name in ("__init__", "receipt", "issuer")]
    parts = {part_of(found.module, PACKAGE) for path in issuing for found in imports_of(path, RECEIPTS)} - {None}
    assert "engine" in parts
    assert [part for part in parts if LAYERS[part].column not in (BOTH, MASTER) or LAYERS[part].row > 6] == []
    assert {
        each.module for path in issuing for each in imports_of(path, RECEIPTS) if each.module.startswith("mind")
    } == set()


def test_simulator_imports_only_parts_below_the_commands():
    """The simulator must not import MindSpore, and the engine's parts do not."""
    assert imports_above(SIMULATOR, 5.5, commands={"commands", "http_player.py"}) == []


def test_tools_import_only_parts_below_the_commands():
    """The tools must not import MindSpore, except `export`, which uses parts of the WorkAgent, and the
    calibration, which computes the network. `config check` says what the WorkAgent guarantees.
    """
    assert (
        imports_above(
            TOOLS,
            6.5,
            commands={"commands", "background_server.py", "new_folder.py", "server_client.py"},
            except_for={"check_config.py", "export.py", "mindir.py", "calibration.py"},
        )
        == []
    )


def imports_above(root: Path, row: float, commands: set[str], except_for: Collection[str] = ()) -> list[str]:
    """Return the imports of a package beside the server that name a part of `row` or above, or of the WorkAgent.
    Folders and files named in `commands` may import the parts of the command line as well.
    """
    wrong = []
    for path in sources(root):
        is_command = path.relative_to(root).parts[0] in commands
        own, columns = (8.09, {MASTER, BOTH, TOP}) if is_command else (row, {MASTER, BOTH})
        for found in imports_of(path, root):
            part = part_of(found.module, PACKAGE)
            if part is None or path.name in except_for:
                continue
            if LAYERS[part].row >= own or LAYERS[part].column not in columns:
                wrong.append(f"{path.relative_to(root)}:{found.line} imports {found.module}")
    return wrong


def test_no_part_imports_pickle():
    unsafe = [
        f"{path.relative_to(root)}:{found.line} imports {found.module}"
        for root in (PACKAGE, SIMULATOR, RECEIPTS, TOOLS)
        for path in sources(root)
        for found in imports_of(path, root)
        if found.module.split(".")[0] in UNSAFE
    ]
    assert unsafe == []


def test_computing_parts_import_no_socket():
    """Computing parts must use functions that callers pass to report something."""
    parts = {"network", "models", "kernels", "backends", "lowering", "worker"}
    files = [path for path in PACKAGE.rglob("*") if path.suffix in {".py", ".cc", ".h"}]
    computing = [path for path in files if path.relative_to(PACKAGE).parts[0] in parts]
    assert len(computing) > 100
    assert [str(path) for path in computing if re.search(r"\bsockets?\b", path.read_text(), re.IGNORECASE)] == []


def test_load_tests_import_nothing_of_the_package():
    root = PROJECT / "performance"
    clients = [path for path in sources(root) if path.relative_to(root).parts[0] not in MEASURE_IN_PROCESS]
    assert len(clients) > 10
    found = [f"{path.name}: {item.module}" for path in clients for item in imports_of(path, root)]
    assert [text for text in found if text.split(": ")[1].split(".")[0] == NAME] == []


# The checker itself


@pytest.fixture
def package(tmp_path):
    """Write the files of a small package of the same name; return its root."""

    def write(**files: str) -> Path:
        root = tmp_path / NAME
        for name, text in {"__init__": "", **files}.items():
            path = root / (name.replace("__in__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return root

    return write


@pytest.mark.parametrize(
    ("importer", "text"),
    [
        ("scheduler__in__policy", "import llm_serving.engine.engine"),
        ("scheduler__in__policy", "from llm_serving.engine import engine"),
        ("scheduler__in__policy", "from llm_serving import engine"),
        ("scheduler__in__policy", "from llm_serving.recording.recorder import Recorder"),
        ("observability__in__event_log", "from llm_serving.text.tokenizer.tokenizer import Tokenizer"),
        ("scheduler__in__policy", "from ..engine.engine import run"),
        ("scheduler__in__policy", "def later():\n    from llm_serving.engine.engine import run"),
        ("scheduler__in__policy", "import importlib\nimportlib.import_module('llm_serving.engine.engine')"),
        ("master", "from llm_serving.work_agent import run"),
        ("worker__in__runner", "from llm_serving.engine.engine import run"),
        ("kernels__in__library", "from llm_serving.core import step"),
        ("core__in__step", "from llm_serving.config import schema"),
        ("log", "from llm_serving.core import step"),
    ],
)
def test_import_check_detects_an_import_upwards_or_across(package, importer, text):
    files = {"engine__in__engine": "", "work_agent": "", "core__in__step": "", "config__in__schema": ""}
    files |= {"recording__in__recorder": "", "text__in__tokenizer": ""}
    assert len(direction_violations(package(**(files | {importer: text})))) == 1


def test_import_check_allows_rows_below(package):
    root = package(
        engine__in__engine="from llm_serving.scheduler.policies import x\nfrom llm_serving.core.step import y",
        scheduler__in__policy="import llm_serving.transport.codec\nfrom . import __doc__",
        backends__in__cpu="from llm_serving.kernels.library import z",
        offline="from llm_serving.engine.engine import a\nfrom llm_serving.worker.runner import b",
        cli="from llm_serving import __version__",
        core__in__step="",
        transport__in__codec="",
        kernels__in__library="from llm_serving.errors import KernelError",
        errors="",
        worker__in__runner="",
    )
    assert direction_violations(root) == []


def test_import_check_follows_chains_to_mindspore(package):
    root = package(
        master="from llm_serving.core import step",
        core__in__step="def lazily():\n    import mindspore.ops",
    )
    assert reaches(root, f"{NAME}.master", "mindspore") == [f"{NAME}.master", f"{NAME}.core.step", "mindspore.ops"]
    assert reaches(root, f"{NAME}.master", "mindspore", at_top_only=True) == []
