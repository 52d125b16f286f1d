"""What a load came to, as numbers with names: of all requests, of each class, of each tenant."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from llm_serving_simulator.outcome import Outcome
from llm_serving_simulator.simulation import Result

LATENCIES: Final = ("ttft", "tpot", "itl", "latency")
QUANTILES: Final = ("p50", "p99")
OF_GROUP: Final = (
    "requests",
    "answered",
    "refused",
    "failed",
    "retries",
    "requests_per_s",
    "output_tokens_per_s",
    "goodput_per_s",
    "goodput_share",
    *(f"{latency}_{quantile}_ms" for latency in LATENCIES for quantile in QUANTILES),
)
"""Of all, of a class (`interactive.ttft_p99_ms`), of a tenant (`tenant alice.goodput_share`)."""
OF_ALL: Final = (
    "duration_s",
    "fairness",
    "preemptions",
    "bound_violations",
    "block_use_mean",
    "block_use_peak",
    "busy_share",
    "steps",
    "steps_beyond",
    "tokens_per_step",
    "draft_tokens",
    "accepted_draft_tokens",
)
"""Of the server."""
SHARES: Final = ("goodput_share", "block_use_mean", "block_use_peak", "busy_share", "fairness")
"""From 0 to 1."""
LESS_IS_BETTER: Final = frozenset(
    name
    for name in (*OF_GROUP, *OF_ALL)
    if name.endswith("_ms")
    or name
    in ("refused", "failed", "retries", "duration_s", "preemptions", "bound_violations", "steps", "steps_beyond")
    or name.startswith("block_use")
)

Figures = dict[str, float]


def figures_of(result: Result) -> Figures:
    """All numbers; NaN where nothing was measured.

    Latencies are those of answered requests, inter-token latencies all gaps between their tokens; goodput counts
    requests that kept the promises of their class. Fairness is Jain's index over the tenants' shares of the tokens they
    asked for and were answered with (Jain, Chiu and Hawe, DEC-TR-301, 1984): 1 where all got the same share.
    """
    outcomes = result.outcomes
    ends = max((each.end_s for each in outcomes), default=0.0)
    span = ends - min((each.due_s for each in outcomes), default=0.0)
    figures = _group(outcomes, span)
    for name, members in _by(outcomes, lambda each: each.request_class.name).items():
        figures |= {f"{name}.{key}": value for key, value in _group(members, span).items()}
    tenants = _by(outcomes, lambda each: each.tenant)
    if len(tenants) > 1 or "" not in tenants:
        for name, members in tenants.items():
            figures |= {f"tenant {name}.{key}": value for key, value in _group(members, span).items()}
    use = [share for time, share in result.block_use if time <= ends]
    figures |= {
        "duration_s": span,
        "fairness": _fairness(tenants.values()),
        "preemptions": result.preemptions,
        "bound_violations": result.bound_violations,
        "block_use_mean": sum(use) / len(use) if use else math.nan,
        "block_use_peak": max(use, default=math.nan),
        "busy_share": result.busy_share,
        "steps": result.num_steps,
        "steps_beyond": result.num_steps_beyond,
        "tokens_per_step": result.num_tokens / max(1, result.num_steps),
        "draft_tokens": result.num_draft_tokens,
        "accepted_draft_tokens": result.num_accepted,
    }
    return figures


def _by(outcomes: Iterable[Outcome], key: Callable[[Outcome], str]) -> dict[str, list[Outcome]]:
    groups: dict[str, list[Outcome]] = {}
    for each in outcomes:
        groups.setdefault(key(each), []).append(each)
    return dict(sorted(groups.items()))


def _group(outcomes: Sequence[Outcome], span: float) -> Figures:
    answered = [each for each in outcomes if each.ok]
    num_met = sum(each.met_slo for each in outcomes)
    refused = sum(each.finish == "refused" for each in outcomes)

    def per_s(count: float) -> float:
        return count / span if span > 0 else 0.0

    values: dict[str, list[float]] = {
        "ttft": [each.ttft_s for each in answered if each.ttft_s is not None],
        "tpot": [each.tpot_s for each in answered if each.tpot_s is not None],
        "itl": [
            after - before
            for each in answered
            for before, after in zip(each.token_times_s, each.token_times_s[1:], strict=False)
        ],
        "latency": [each.end_s - each.due_s for each in answered],
    }
    figures: Figures = {
        "requests": len(outcomes),
        "answered": len(answered),
        "refused": refused,
        "failed": len(outcomes) - len(answered) - refused,
        "retries": sum(each.num_retries for each in outcomes),
        "requests_per_s": per_s(len(answered)),
        "output_tokens_per_s": per_s(sum(len(each.token_times_s) for each in answered)),
        "goodput_per_s": per_s(num_met),
        "goodput_share": num_met / len(outcomes) if outcomes else math.nan,
    }
    for name, seconds in values.items():
        ordered = sorted(seconds)
        for quantile in QUANTILES:
            figures[f"{name}_{quantile}_ms"] = 1e3 * percentile(ordered, float(quantile[1:]))
    return figures


def percentile(ordered: Sequence[float], q: float) -> float:
    """The `q`-th percentile (0 to 100) of ascending values, linear between closest ranks; NaN for none."""
    if not ordered:
        return math.nan
    rank = (len(ordered) - 1) * q / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def _fairness(tenants: Iterable[Sequence[Outcome]]) -> float:
    shares = []
    for members in tenants:
        asked = sum(each.num_prompt_tokens + each.num_wanted for each in members)
        got = sum(each.num_prompt_tokens + len(each.token_times_s) for each in members if each.ok)
        shares.append(got / asked if asked else 1.0)
    squares = sum(share**2 for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else math.nan
