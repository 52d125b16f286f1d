"""Results side by side, to be looked at."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from llm_serving.errors import ConfigError
from llm_serving.whatif.figures import Figures
from llm_serving.whatif.reach import BEYOND
from llm_serving.whatif.report import mark
from llm_serving.whatif.simulation import Result

BUCKETS: Final = 60
"""Of time, that arrivals and block use are averaged over."""
STYLES: Final = ("-", "--", ":", "-.")
"""Of the lines of classes, highest first."""
NAMED_IN_A_LINE: Final = 200
"""Characters of the configurations' names in a line below the plot."""


def write_svg(results: Sequence[tuple[Result, Figures]], path: Path) -> None:
    """Writes a plot: distribution of the time to first token by class, tokens a second, blocks in use.

    Raises:
        ConfigError: The file cannot be written.
    """
    plt = _pyplot()
    names = [f"{result.name}: {figures['output_tokens_per_s']:,.0f} tokens/s" for result, figures in results]
    columns = max(1, NAMED_IN_A_LINE // max(map(len, names)))
    height = 4.4 + 0.22 * math.ceil(len(names) / columns)
    figure, axes = plt.subplots(1, 3, figsize=(15, height), layout="constrained")
    lines, styles = [], _styles(results)
    for color, ((result, figures), name) in enumerate(zip(results, names, strict=True)):
        _first_tokens(axes[0], result, f"C{color}", styles)
        times, tokens = _rate(result)
        lines += axes[1].plot(times, tokens, color=f"C{color}", label=name)
        times, use = _mean(result.block_use, figures["duration_s"])
        axes[2].plot(times, [100 * each for each in use], color=f"C{color}")
    axes[0].set(xlabel="time to first token, ms", ylabel="share of the class's requests, %", xscale="log")
    axes[0].legend(handles=[plt.Line2D([], [], color="0.3", label=name, ls=ls) for ls, name in styles])
    axes[1].set(xlabel="s", ylabel="output tokens/s", ylim=(0, None))
    axes[2].set(xlabel="s", ylabel="blocks in use, %", ylim=(0, 105))
    figure.legend(handles=lines, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    beyond = [f"{BEYOND}: {result.name}" for result, _ in results if result.num_steps_beyond]
    marks = "; ".join(dict.fromkeys([*(mark(result.profile) for result, _ in results), *beyond]))
    figure.suptitle(f"load {results[0][0].load}; {marks}", fontsize=8)
    try:
        figure.savefig(path, format="svg", metadata={"Date": None})
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        plt.close(figure)


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
        shares = [100 * (place + 1) / len(members) for place in range(len(waited))]
        axis.step(waited, shares, style, color=color, where="post")


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
