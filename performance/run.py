"""Run one benchmark by name.

    python performance/run.py --list             list every benchmark
    python performance/run.py NAME --help        show the options of a benchmark
    python performance/run.py NAME ARGUMENTS     run it

`benchmarks/` measures the package inside this process, so it needs the project's interpreter. `experiments/` starts
servers and loads them over HTTP; it needs matplotlib (`pip install -e 'llm-serving[bench]'`). The load test of a
running server is `test_serving_performance.py`; here its name is `load_test`.
"""

from __future__ import annotations

import ast
import importlib
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent
NOT_EXPERIMENTS = {"bench", "measures", "results"}
"""Modules of `experiments/` that the experiments share."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    modules = dict(benchmarks())
    if arguments == ["--list"]:
        width = max(map(len, modules))
        for name, module in modules.items():
            print(f"{name:{width}}  {summary(module)}")
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in modules:
        print(f"error: no benchmark is named {name}. `python performance/run.py --list` lists them.", file=sys.stderr)
        return 2
    sys.argv[0] = f"run.py {name}"  # argparse names it in its usage and errors
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # unwinds the stack, which stops the servers
    benchmark = importlib.import_module(modules[name])
    if modules[name].startswith("experiments."):
        from experiments.results import run_experiment

        return run_experiment(name, benchmark.run, benchmark.__doc__ or "", rest)
    return int(benchmark.main(rest))


def benchmarks() -> Iterator[tuple[str, str]]:
    """Yield (name, module) of every benchmark."""
    yield "load_test", "test_serving_performance"
    for folder in ("benchmarks", "experiments"):
        for path in sorted((ROOT / folder).glob("*.py")):
            if folder == "benchmarks" or path.stem not in NOT_EXPERIMENTS:
                yield path.stem, f"{folder}.{path.stem}"


def summary(module: str) -> str:
    """Return the first line of a module's docstring without importing the module."""
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
