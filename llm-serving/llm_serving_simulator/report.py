"""Results side by side, as a table, as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Final

from llm_serving.errors import shorten

from llm_serving_simulator.capacity import Capacity
from llm_serving_simulator.figures import OF_ALL, OF_GROUP, SHARES, Figures
from llm_serving_simulator.profile import Profile
from llm_serving_simulator.simulation import Result

_WHOLE: Final = (
    "requests",
    "answered",
    "refused",
    "failed",
    "retries",
    "preemptions",
    "bound_violations",
    "steps",
    "steps_beyond",
    "draft_tokens",
    "accepted_draft_tokens",
)
_OF_CLASS: Final = (
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


def table(results: Sequence[tuple[Result, Figures]]) -> str:
    """A column for each result, a line for each number; then the classes, then what the numbers rest on."""
    names = [result.name for result, _ in results]
    lines: list[list[str]] = [["", *names], *(_line(key, key, results) for key in (*OF_GROUP, *OF_ALL))]
    for name in _class_names(results):
        lines += [[], [f"class {name}", *[""] * len(names)]]
        lines += [_line(f"  {key}", f"{name}.{key}", results) for key in _OF_CLASS]
    widths = [max(len(row[place]) for row in lines if row) for place in range(len(names) + 1)]
    text = [
        "".join(
            cell.ljust(widths[0]) if place == 0 else cell.rjust(widths[place] + GAP) for place, cell in enumerate(row)
        ).rstrip()
        if row
        else ""
        for row in lines
    ]
    return "\n".join([*text, "", *_footer(results)])


def as_json(
    results: Sequence[tuple[Result, Figures]],
    capacities: Sequence[Capacity] = (),
    needs: Sequence[Sequence[str]] = (),
) -> str:
    """All numbers, null where nothing was measured.

    Args:
        results: Of each configuration.
        capacities: Of each the highest rate, if that was looked for.
        needs: What would have to change in each, in lines, if that was asked.
    """
    document: list[dict[str, Any]] = [
        {
            "config": result.name,
            "load": result.load,
            "profile": _of_profile(result.profile),
            "num_blocks": result.num_blocks,
            "notices": list(result.notices),
            "figures": _known(figures),
        }
        for result, figures in results
    ]
    for of_one, capacity in zip(document, capacities, strict=False):
        of_one["highest_rate"] = {
            "requests_per_s": capacity.requests_per_s,
            "factor": capacity.factor,
            "is_highest": capacity.is_highest,
            "notices": list(capacity.result.notices),
            "figures": _known(capacity.figures),
        }
    for of_one, lines in zip(document, needs, strict=False):
        of_one["needs"] = list(lines)
    return json.dumps(document, indent=1)


def _known(figures: Figures) -> dict[str, float | None]:
    return {key: None if math.isnan(value) else value for key, value in figures.items()}


def mark(profile: Profile) -> str:
    """What every output says of where its times come from."""
    if profile.measured:
        return f"times of {profile.name}: {profile.source}"
    return f"NOT MEASURED: times of {profile.name} are figures of {profile.source}"


def _of_profile(profile: Profile) -> dict[str, Any]:
    return {"name": profile.name, "source": profile.source, "measured": profile.measured}


def _line(title: str, key: str, results: Sequence[tuple[Result, Figures]]) -> list[str]:
    return [title, *(number(key, figures.get(key, math.nan)) for _, figures in results)]


def number(key: str, value: float) -> str:
    """A number as people read it, by what it is."""
    name = key.rpartition(".")[2]
    if math.isnan(value):
        return "-"
    if name in _WHOLE:
        return f"{value:,.0f}"
    if name in SHARES:
        return f"{value:.3f}" if name == "fairness" else f"{value:.1%}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _class_names(results: Sequence[tuple[Result, Figures]]) -> list[str]:
    classes = {each.request_class.name: each.request_class.rank for result, _ in results for each in result.outcomes}
    return sorted(classes, key=lambda name: classes[name])


def _footer(results: Sequence[tuple[Result, Figures]]) -> list[str]:
    lines = dict.fromkeys(mark(result.profile) for result, _ in results)
    for result, _ in results:
        lines |= dict.fromkeys(f"{result.name}: {notice}" for notice in result.notices)
        reasons = dict.fromkeys(each.error for each in result.outcomes if each.error)
        if reasons:
            first = shorten(next(iter(reasons)))
            lines[f"{result.name}: first of {len(reasons)} reasons why requests were not answered: {first}"] = None
    return list(lines)
