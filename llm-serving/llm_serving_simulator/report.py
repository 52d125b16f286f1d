"""Results side by side: as a table, as JSON and as a plot."""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from llm_serving.errors import ConfigError, shorten

from llm_serving_simulator.figures import (
    GROUP_FIGURES,
    RENAMED,
    SERVER_FIGURES,
    SHARES,
    Capacity,
    Figures,
    SimulationResult,
)
from llm_serving_simulator.files import write_file
from llm_serving_simulator.profile import EXTRAPOLATED, Profile

Results = Sequence[tuple[SimulationResult, Figures]]

_INTEGERS: Final = (
    "requests",
    "answered",
    "refused",
    "failed",
    "retries",
    "preemptions",
    "bound_violations",
    "steps",
    "extrapolated_steps",
    "draft_tokens",
    "accepted_draft_tokens",
)
_CLASS_FIGURES: Final = (
    "requests",
    "refused",
    "goodput_per_s",
    "goodput_share",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "tpot_p99_ms",
)
GAP: Final = 2
"""Spaces between two columns."""


def table(results: Results) -> str:
    """Return a table with a column for each result: all requests, each class, then profiles and notices."""
    names = [result.name for result, _ in results]
    rows: list[list[str]] = [["", *names], *(_row(key, key, results) for key in (*GROUP_FIGURES, *SERVER_FIGURES))]
    for name in _class_names(results):
        rows += [[], [f"class {name}", *[""] * len(names)]]
        rows += [_row(f"  {key}", f"{name}.{key}", results) for key in _CLASS_FIGURES]
    widths = [max(len(row[column]) for row in rows if row) for column in range(len(names) + 1)]
    lines = [
        "".join(
            cell.ljust(widths[0]) if column == 0 else cell.rjust(widths[column] + GAP)
            for column, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, "", *_footer(results)])


def as_json(results: Results, capacities: Sequence[Capacity] = (), needs: Sequence[Sequence[str]] = ()) -> str:
    """Return all figures as JSON, null where nothing was measured.

    Args:
        results: Result of each configuration.
        capacities: Highest rate of each configuration, if requested.
        needs: For each configuration the lines with changes that meet the constraints, if requested.
    """
    document: list[dict[str, Any]] = [
        {
            "config": result.name,
            "load": result.load,
            "profile": {
                "name": result.profile.name,
                "source": result.profile.source,
                "measured": result.profile.measured,
            },
            "num_blocks": result.num_blocks,
            "notices": list(result.notices),
            "figures": _json_figures(figures),
        }
        for result, figures in results
    ]
    for row, capacity in zip(document, capacities, strict=False):
        row["highest_rate"] = {
            "requests_per_s": capacity.requests_per_s,
            "factor": capacity.factor,
            "is_highest": capacity.is_highest,
            "notices": list(capacity.result.notices),
            "figures": _json_figures(capacity.figures),
        }
    for row, lines in zip(document, needs, strict=False):
        row["needs"] = list(lines)
    return json.dumps(document, indent=1)


def _json_figures(figures: Figures) -> dict[str, float | None]:
    """Return the figures without NaN, and with their old names."""
    named = figures | {old: figures[new] for old, new in RENAMED.items() if new in figures}
    return {key: None if math.isnan(value) else value for key, value in named.items()}


def profile_source(profile: Profile) -> str:
    """Return where a profile's times come from, as every output repeats it."""
    if profile.measured:
        return f"times of {profile.name}: {profile.source}"
    return f"NOT MEASURED: times of {profile.name} are figures of {profile.source}"


def format_figure(key: str, value: float) -> str:
    """Format the value of a figure: counts as integers, shares in per cent."""
    name = key.rpartition(".")[2]
    if math.isnan(value):
        return "-"
    if name in _INTEGERS:
        return f"{value:,.0f}"
    if name in SHARES:
        return f"{value:.3f}" if name == "fairness" else f"{value:.1%}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _row(title: str, key: str, results: Results) -> list[str]:
    return [title, *(format_figure(key, figures.get(key, math.nan)) for _, figures in results)]


def _class_names(results: Results) -> list[str]:
    classes = {each.request_class.name: each.request_class.rank for result, _ in results for each in result.outcomes}
    return sorted(classes, key=lambda name: classes[name])


def _footer(results: Results) -> list[str]:
    lines = dict.fromkeys(profile_source(result.profile) for result, _ in results)
    for result, _ in results:
        lines |= dict.fromkeys(f"{result.name}: {notice}" for notice in result.notices)
        reasons = dict.fromkeys(each.error for each in result.outcomes if each.error)
        if reasons:
            first = shorten(next(iter(reasons)))
            lines[f"{result.name}: first of {len(reasons)} reasons why requests were not answered: {first}"] = None
    return list(lines)


# --- plots ------------------------------------------------------------------------------------------------------------

NUM_BUCKETS: Final = 60
"""Time buckets of the output rate and of the block use."""
CLASS_STYLES: Final = ("-", "--", ":", "-.")
LEGEND_CHARACTERS: Final = 140
"""Characters of configuration names in one line of the legend."""
MAX_SPAN_WITH_MINOR_LABELS: Final = 30
"""Ratio of a logarithmic axis's ends up to which ticks between powers of ten are labelled."""
MAX_POINTS: Final = 200
"""Points of a line; more make no visible difference."""


def write_svg(results: Results, path: Path) -> None:
    """Plot TTFT by class, output tokens per second and blocks in use; the same results give the same bytes.

    Raises:
        ConfigError: The file cannot be written, or matplotlib is missing.
    """
    plt = pyplot()
    names = [f"{result.name}: {figures['output_tokens_per_s']:,.0f} tokens/s" for result, figures in results]
    columns = max(1, LEGEND_CHARACTERS // max(map(len, names)))
    height = 3.7 + 0.22 * math.ceil(len(names) / columns)
    figure, axes = plt.subplots(1, 3, figsize=(12, height), layout="constrained")
    lines, styles = [], _class_styles(results)
    for color, ((result, figures), name) in enumerate(zip(results, names, strict=True)):
        _plot_ttft(axes[0], result, f"C{color}", styles)
        lines += axes[1].plot(*_output_rate(result), color=f"C{color}", label=name)
        times, use = _bucket_means(result.block_use, figures["duration_s"])
        axes[2].plot(times, [100 * each for each in use], color=f"C{color}")
    axes[0].set(xlabel="ms", ylabel="% of a class's requests within", xscale="log", ylim=(0, 103))
    axes[0].set_title("time to first token")
    _label_log_axis(axes[0])
    axes[0].legend(handles=[plt.Line2D([], [], color="0.3", label=name, ls=ls) for ls, name in styles])
    axes[1].set(xlabel="s", ylabel="tokens/s", xlim=(0, None), ylim=(0, None), title="output")
    axes[1].yaxis.set_major_formatter("{x:,g}")
    axes[2].set(xlabel="s", ylabel="% of all blocks", xlim=(0, None), ylim=(0, 103), title="cache in use")
    figure.legend(handles=lines, loc="outside lower center", ncols=columns, frameon=False)
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    extrapolated = [f"{EXTRAPOLATED}: {result.name}" for result, _ in results if result.num_extrapolated_steps]
    marks = "; ".join(dict.fromkeys([*(profile_source(result.profile) for result, _ in results), *extrapolated]))
    figure.suptitle(f"load {results[0][0].load}; {marks}", fontsize=8)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    plt.close(figure)
    write_file(path, drawn.getvalue())


def pyplot() -> Any:
    """Import matplotlib.pyplot for SVG output.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("a plot needs matplotlib: pip install -e 'llm-serving[bench]'") from None
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "llm-serving"
    matplotlib.rcParams["text.parse_math"] = False  # names may contain "$"
    matplotlib.rcParams["font.size"] = 9
    matplotlib.rcParams["axes.titlesize"] = 10
    import matplotlib.pyplot as plt

    return plt


def _class_styles(results: Results) -> list[tuple[str, str]]:
    """Return (line style, class name), highest class first."""
    classes = {each.request_class for result, _ in results for each in result.outcomes}
    names = dict.fromkeys(each.name for each in sorted(classes, key=lambda each: (each.rank, each.name)))
    return list(zip(itertools.cycle(CLASS_STYLES), names, strict=False))


def _plot_ttft(axis: Any, result: SimulationResult, color: str, styles: Sequence[tuple[str, str]]) -> None:
    for style, name in styles:
        members = [each for each in result.outcomes if each.request_class.name == name]
        times = sorted(1e3 * each.ttft_s for each in members if each.ttft_s is not None)
        shown = [len(times) * (point + 1) // MAX_POINTS for point in range(MAX_POINTS)]
        ranks = [each for each in dict.fromkeys([1, *shown]) if 0 < each <= len(times)]
        shares = [100 * each / len(members) for each in ranks]
        axis.step([times[each - 1] for each in ranks], shares, style, color=color, where="post")


def _label_log_axis(axis: Any) -> None:
    low, high = axis.get_xlim()
    axis.xaxis.set_major_formatter("{x:,g}")
    axis.xaxis.set_minor_formatter("{x:,g}" if high < MAX_SPAN_WITH_MINOR_LABELS * low else "")


def _output_rate(result: SimulationResult) -> tuple[list[float], list[float]]:
    times = [time for each in result.outcomes for time in each.token_times_s]
    width = max(times, default=1.0) / NUM_BUCKETS or 1.0
    counts = [0] * NUM_BUCKETS
    for time in times:
        counts[min(NUM_BUCKETS - 1, int(time / width))] += 1
    return [(bucket + 0.5) * width for bucket in range(NUM_BUCKETS)], [count / width for count in counts]


def _bucket_means(samples: Sequence[tuple[float, float]], end: float) -> tuple[list[float], list[float]]:
    width = end / NUM_BUCKETS or 1.0
    buckets: dict[int, list[float]] = {}
    for time, value in samples:
        if time <= end:
            buckets.setdefault(min(NUM_BUCKETS - 1, int(time / width)), []).append(value)
    ordered = sorted(buckets)
    means = [sum(buckets[bucket]) / len(buckets[bucket]) for bucket in ordered]
    return [(bucket + 0.5) * width for bucket in ordered], means
