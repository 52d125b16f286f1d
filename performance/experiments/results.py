"""Output of an experiment (Markdown tables, JSON with the raw timestamps, an SVG plot) and its command line."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.bench import Bench, ServerError
from load_test import report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Table:
    """A table of texts and numbers; `None` and NaN are shown as a dash."""

    header: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]

    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *([cell(value) for value in row] for row in self.rows)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: str | float | None) -> str:
    """Format a cell; numbers have three digits, the precision of measured times."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


@dataclass(frozen=True)
class Result:
    """The result of an experiment.

    Attributes:
        title: One line.
        load: Description of the load, in sentences.
        tables: Title -> table.
    """

    title: str
    load: str
    tables: dict[str, Table]
    figure: Figure


def markdown(bench: Bench, result: Result) -> str:
    """Return the result as Markdown, with the machine and whether the answers were right."""
    exact, on = bench.exact, report.describe()
    notes = [
        f"{on['processor']}; model {bench.model}; seed {bench.seed}. {result.load}",
        f"Answers equal to the reference answer (batch size 1): {exact.num_exact} of {exact.num_expected}. Failed "
        f"requests: {bench.num_failed}. `llm_serving:bound_violations_total`: {bench.num_bound_violations}, WorkAgents "
        f"restarted: {bench.num_restarts}, over {len(bench.server_totals)} servers.",
    ]
    if bench.known_right:
        notes[1] += (
            f" Of the reference answers, {sum(bench.known_right)} of {len(bench.known_right)} are the known right one."
        )
    tables = [f"{title}\n\n{table.markdown()}" for title, table in result.tables.items()]
    return "\n\n".join([f"# {result.title}", *notes, *tables]) + "\n"


def document(bench: Bench, result: Result) -> dict[str, Any]:
    """Return the result with the raw timestamps, from which other figures can be computed."""
    values = {
        "title": result.title,
        "load": result.load,
        "machine": report.describe(),
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
    document: dict[str, Any] = report.without_nan(values)
    return document


def write(bench: Bench, result: Result, folder: Path, name: str) -> None:
    """Write NAME.md, NAME.json and NAME.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(markdown(bench, result), encoding="utf-8")
    text = json.dumps(document(bench, result), ensure_ascii=False)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    result.figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def run_experiment(name: str, run: Callable[[Bench], Result], description: str, argv: Sequence[str]) -> int:
    """Run an experiment, write its files and print its tables.

    Returns:
        The exit status: 0 when every response equals its reference answer and no bound on waiting was broken, else 1.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="for NAME.md, NAME.json, NAME.svg")
    parser.add_argument("--model", default="demo", help="a Hugging Face folder, or `demo` (the default)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the arrivals and of the choice of prompts")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of requests; < 1 is a quick try")
    arguments = parser.parse_args(argv)
    if importlib.util.find_spec("matplotlib") is None:
        print("error: an experiment needs matplotlib: pip install -e 'llm-serving[bench]'", file=sys.stderr)
        return 2
    bench = Bench(arguments.model, arguments.seed, arguments.scale)
    try:
        result = run(bench)
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write(bench, result, arguments.output, name)
    print(markdown(bench, result))
    return 0 if bench.went_right else 1


COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3")
WIDTH_INCHES = 9.0


def panels(num_rows: int, num_columns: int, height_inches: float) -> tuple[Figure, list[Axes]]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rc("svg", hashsalt="llm-serving")
    mpl.rc("font", size=9)
    mpl.rc("axes", titlesize=10)
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    figure.patch.set_facecolor("white")
    axes = figure.subplots(num_rows, num_columns, squeeze=False)
    for panel in axes.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
    return figure, list(axes.flat)


def grouped_bars(
    panel: Axes, groups: Sequence[str], series: Mapping[str, Sequence[float]], text: str | None = "{:.3g}"
) -> None:
    """Draw a bar for each group and series; `text` formats the value above a bar, None omits it."""
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        positions = [group - 0.4 + width * (number + 0.5) for group in range(len(groups))]
        bars = panel.bar(positions, values, width, label=name, color=COLOURS[number % len(COLOURS)])
        if text is not None:
            panel.bar_label(bars, labels=[text.format(value) for value in values], fontsize=6.5, padding=1)
    panel.set_xticks(range(len(groups)), groups)


def logarithmic(panel: Axes, bottom: float) -> None:
    """Make the y axis logarithmic from `bottom` on, labelled 10, 100, 1,000; call it after drawing."""
    panel.set_yscale("log")
    panel.set_ylim(bottom, 3 * panel.get_ylim()[1])  # room for figures and a legend
    panel.yaxis.set_major_formatter("{x:,.0f}")
    panel.yaxis.set_minor_formatter("")


def legend_below(figure: Figure, panel: Axes) -> None:
    """Draw one legend for all panels, from the labels of one."""
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
