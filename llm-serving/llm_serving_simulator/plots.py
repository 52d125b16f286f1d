"""Results side by side, to be looked at."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from llm_serving.errors import ConfigError

from llm_serving_simulator.figures import Figures
from llm_serving_simulator.out_file import write_out
from llm_serving_simulator.reach import BEYOND
from llm_serving_simulator.report import mark
from llm_serving_simulator.simulation import Result

BUCKETS: Final = 60
"""Of time, that arrivals and block use are averaged over."""
STYLES: Final = ("-", "--", ":", "-.")
"""Of the lines of classes, highest first."""
NAMED_IN_A_LINE: Final = 140
"""Characters of the configurations' names in a line below the plot."""
FEW_DECADES: Final = 30
"""An axis to so many times its beginning has room for the numbers between two powers of ten."""
MOST_POINTS: Final = 200
"""Of a line; more can hardly be told apart."""


def write_svg(results: Sequence[tuple[Result, Figures]], path: Path) -> None:
    """Writes a plot, always the same bytes: times to first token by class, tokens a second, blocks in use.

    Raises:
        ConfigError: The file cannot be written.
    """
    plt = _pyplot()
    names = [f"{result.name}: {figures['output_tokens_per_s']:,.0f} tokens/s" for result, figures in results]
    columns = max(1, NAMED_IN_A_LINE // max(map(len, names)))
    height = 3.7 + 0.22 * math.ceil(len(names) / columns)
    figure, axes = plt.subplots(1, 3, figsize=(12, height), layout="constrained")
    lines, styles = [], _styles(results)
    for color, ((result, figures), name) in enumerate(zip(results, names, strict=True)):
        _first_tokens(axes[0], result, f"C{color}", styles)
        times, tokens = _rate(result)
        lines += axes[1].plot(times, tokens, color=f"C{color}", label=name)
        times, use = _mean(result.block_use, figures["duration_s"])
        axes[2].plot(times, [100 * each for each in use], color=f"C{color}")
    axes[0].set(xlabel="ms", ylabel="% of a class's requests within", xscale="log", ylim=(0, 103))
    axes[0].set_title("time to first token")
    _plain_numbers(axes[0])
    axes[0].legend(handles=[plt.Line2D([], [], color="0.3", label=name, ls=ls) for ls, name in styles])
    axes[1].set(xlabel="s", ylabel="tokens/s", xlim=(0, None), ylim=(0, None), title="output")
    axes[1].yaxis.set_major_formatter("{x:,g}")
    axes[2].set(xlabel="s", ylabel="% of all blocks", xlim=(0, None), ylim=(0, 103), title="cache in use")
    figure.legend(handles=lines, loc="outside lower center", ncols=columns, frameon=False)
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    beyond = [f"{BEYOND}: {result.name}" for result, _ in results if result.num_steps_beyond]
    marks = "; ".join(dict.fromkeys([*(mark(result.profile) for result, _ in results), *beyond]))
    figure.suptitle(f"load {results[0][0].load}; {marks}", fontsize=8)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    plt.close(figure)
    write_out(path, drawn.getvalue())


def check_plots() -> None:
    """Raises ConfigError where matplotlib is not installed."""
    _pyplot()


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("a plot wants matplotlib: pip install -e 'llm-serving[bench]'") from None
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "llm-serving"
    matplotlib.rcParams["text.parse_math"] = False  # names and sources are what they are
    matplotlib.rcParams["font.size"] = 9
    matplotlib.rcParams["axes.titlesize"] = 10
    import matplotlib.pyplot as plt

    return plt


def _styles(results: Sequence[tuple[Result, Figures]]) -> list[tuple[str, str]]:
    """(style of lines, class), highest first."""
    classes = {each.request_class for result, _ in results for each in result.outcomes}
    names = dict.fromkeys(each.name for each in sorted(classes, key=lambda each: (each.rank, each.name)))
    return list(zip(itertools.cycle(STYLES), names, strict=False))


def _first_tokens(axis: Any, result: Result, color: str, styles: Sequence[tuple[str, str]]) -> None:
    for style, name in styles:
        members = [each for each in result.outcomes if each.request_class.name == name]
        waited = sorted(1e3 * each.ttft_s for each in members if each.ttft_s is not None)
        shown = [len(waited) * (place + 1) // MOST_POINTS for place in range(MOST_POINTS)]
        ranks = [each for each in dict.fromkeys([1, *shown]) if 0 < each <= len(waited)]
        shares = [100 * each / len(members) for each in ranks]
        axis.step([waited[each - 1] for each in ranks], shares, style, color=color, where="post")


def _plain_numbers(axis: Any) -> None:
    """Labels of a logarithmic axis as they are read: 20, 100, 1,000."""
    low, high = axis.get_xlim()
    axis.xaxis.set_major_formatter("{x:,g}")
    axis.xaxis.set_minor_formatter("{x:,g}" if high < FEW_DECADES * low else "")


def _rate(result: Result) -> tuple[list[float], list[float]]:
    times = [time for each in result.outcomes for time in each.token_times_s]
    width = max(times, default=1.0) / BUCKETS or 1.0
    counts = [0] * BUCKETS
    for time in times:
        counts[min(BUCKETS - 1, int(time / width))] += 1
    return [(place + 0.5) * width for place in range(BUCKETS)], [count / width for count in counts]


def _mean(samples: Sequence[tuple[float, float]], end: float) -> tuple[list[float], list[float]]:
    width = end / BUCKETS or 1.0
    buckets: dict[int, list[float]] = {}
    for time, value in samples:
        if time <= end:
            buckets.setdefault(min(BUCKETS - 1, int(time / width)), []).append(value)
    return [(place + 0.5) * width for place in sorted(buckets)], [
        sum(buckets[place]) / len(buckets[place]) for place in sorted(buckets)
    ]
