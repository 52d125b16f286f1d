"""Results side by side, to be looked at."""

from __future__ import annotations

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


def write_svg(results: Sequence[tuple[Result, Figures]], path: Path) -> None:
    """Writes a plot: distribution of the time to first token by class, tokens a second, blocks in use.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    plt = _pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.4), layout="constrained")
    for color, (result, figures) in enumerate(results):
        _first_tokens(axes[0], result, f"C{color}")
        times, tokens = _rate(result)
        axes[1].plot(times, tokens, color=f"C{color}", label=f"{result.name}: {figures['output_tokens_per_s']:,.0f}")
        times, use = _mean(result.block_use, figures["duration_s"])
        axes[2].plot(times, [100 * each for each in use], color=f"C{color}", label=result.name)
    axes[0].set(xlabel="time to first token, ms", ylabel="share of the class's requests, %", xscale="log")
    axes[0].legend(fontsize=7)
    axes[1].set(xlabel="s", ylabel="output tokens/s", ylim=(0, None))
    axes[1].legend(fontsize=7)
    axes[2].set(xlabel="s", ylabel="blocks in use, %", ylim=(0, 105))
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    beyond = [f"{BEYOND}: {result.name}" for result, _ in results if result.num_steps_beyond]
    marks = "; ".join(dict.fromkeys([*(mark(result.profile) for result, _ in results), *beyond]))
    figure.suptitle(f"load {results[0][0].load}; {marks}", fontsize=8)
    try:
        figure.savefig(path, metadata={"Date": None})
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from None
    finally:
        plt.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("a plot wants matplotlib: pip install 'llm-serving[bench]'") from None
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "llm-serving"
    import matplotlib.pyplot as plt

    return plt


def _first_tokens(axis: Any, result: Result, color: str) -> None:
    classes = {each.request_class.name: each.request_class.rank for each in result.outcomes}
    for style, name in zip(("-", "--", ":", "-."), sorted(classes, key=lambda each: classes[each]), strict=False):
        members = [each for each in result.outcomes if each.request_class.name == name]
        waited = sorted(1e3 * each.ttft_s for each in members if each.ttft_s is not None)
        shares = [100 * (place + 1) / len(members) for place in range(len(waited))]
        axis.step(waited, shares, style, color=color, where="post", label=f"{result.name}, {name}")


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
