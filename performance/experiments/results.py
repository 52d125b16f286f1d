"""What an experiment leaves behind: a table, a plot, and JSON with the raw timestamps."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import machine

from experiments.bench import Bench

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Table:
    """Rows of texts and numbers; `None` and NaN are shown as a dash."""

    header: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]

    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *([cell(value) for value in row] for row in self.rows)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: str | float | None) -> str:
    """Three digits are what a measurement of seconds is good for."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


@dataclass(frozen=True)
class Result:
    """Of an experiment.

    Attributes:
        title: One line.
        load: What was sent, in sentences.
        tables: With a title each.
    """

    title: str
    load: str
    tables: dict[str, Table]
    figure: "Figure"


def markdown(bench: Bench, result: Result) -> str:
    """The whole result for a reader, with what it was measured on and whether the answers were right."""
    exact, on = bench.exact, machine.describe()
    facts = [
        f"{on['processor']}; model {bench.model}; seed {bench.seed}. {result.load}",
        f"Answers equal to the one given alone: {exact.num_exact} of {exact.num_expected}. Failed requests: "
        f"{bench.num_failed}. `llm_serving:bound_violations_total`: {bench.num_bound_violations}, WorkAgents "
        f"restarted: {bench.num_restarts}, over {len(bench.server_totals)} servers.",
    ]
    if bench.known_right:
        facts[1] += f" Alone, {sum(bench.known_right)} of {len(bench.known_right)} gave the known right answer."
    tables = [f"{title}\n\n{table.markdown()}" for title, table in result.tables.items()]
    return "\n\n".join([f"# {result.title}", *facts, *tables]) + "\n"


def document(bench: Bench, result: Result) -> dict[str, Any]:
    """Everything needed to compute other figures."""
    return {
        "title": result.title,
        "load": result.load,
        "machine": machine.describe(),
        "model": bench.model,
        "seed": bench.seed,
        "scale": bench.scale,
        "exact_match": asdict(bench.exact),
        "num_failed": bench.num_failed,
        "num_bound_violations": bench.num_bound_violations,
        "tables": {title: asdict(table) for title, table in result.tables.items()},
        "server_totals": bench.server_totals,
        "trials": [asdict(trial) for trial in bench.trials],
    }


def write(bench: Bench, result: Result, folder: Path, name: str) -> None:
    """Writes NAME.md, NAME.json and NAME.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(markdown(bench, result), encoding="utf-8")
    text = json.dumps(document(bench, result), ensure_ascii=False)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    result.figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
