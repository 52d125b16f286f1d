"""Figures over the records of trials; pure functions."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from metrics import ServiceLevel, percentile
from records import RequestRecord


def by_group(records: Iterable[RequestRecord]) -> dict[str, list[RequestRecord]]:
    groups: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in records:
        groups[record.task].append(record)
    return dict(groups)


def idle_share(num_tokens: float, num_steps: float, num_slots: int) -> float:
    """Share of slots that produced no token, over all steps; 0 to 1."""
    return 1.0 - num_tokens / (num_steps * num_slots)


def saturated_rate(records: Sequence[RequestRecord]) -> float:
    """Requests a second that a server can sustain, from a load that was sent all at once.

    Tokens are counted until the last request gets its first one: up to then requests waited and no slot was empty,
    whereas what follows is the end of the longest answers.
    """
    until_s = max(record.token_times_s[0] for record in records)
    num_tokens = sum(time_s <= until_s for record in records for time_s in record.token_times_s)
    tokens_per_request = sum(len(record.token_times_s) for record in records) / len(records)
    return num_tokens / until_s / tokens_per_request


def met_share(records: Sequence[RequestRecord], level: ServiceLevel) -> float:
    """Share of requests within their targets, 0 to 1; failed ones are not."""
    return sum(level.met_by(record) for record in records) / len(records)


def goodput_per_s(records: Iterable[RequestRecord], levels: Mapping[str, ServiceLevel], span_s: float) -> float:
    """Requests a second that met the targets of their group."""
    return sum(levels[record.task].met_by(record) for record in records) / span_s


def served_tokens(
    records: Iterable[RequestRecord], num_prompt_tokens: Mapping[str, int], until_s: float | None = None
) -> list[tuple[float, int]]:
    """(second, tokens served by then) at each event: a prompt counts with its first token, then each token.

    Args:
        records: Of one tenant.
        num_prompt_tokens: By prompt.
        until_s: Second of the run at which to stop; None: at the end.
    """
    events: list[tuple[float, int]] = []
    for record in records:
        for number, time_s in enumerate(record.token_times_s):
            events.append((time_s, 1 if number else 1 + num_prompt_tokens[record.prompt]))
    total, served = 0, []
    for time_s, count in sorted(events):
        if until_s is not None and time_s > until_s:
            break
        total += count
        served.append((time_s, total))
    return served


def gaps_ms(records: Iterable[RequestRecord], until_s: float) -> list[float]:
    """Milliseconds between a token and the next, of all requests, where the first came before `until_s`."""
    times = (record.token_times_s for record in records)
    return [1e3 * (after - before) for each in times for before, after in pairwise(each) if before < until_s]


def per_second(records: Iterable[RequestRecord], until_s: int) -> list[int]:
    """How many requests ended in each second of the run."""
    ended = Counter(int(record.end_s) for record in records if record.ok)
    return [ended[second] for second in range(until_s)]


def thinned(points: Sequence[tuple[float, int]], most: int) -> list[tuple[float, int]]:
    """At most about `most` of the points, evenly chosen, the last among them."""
    stride = -(-len(points) // most) if points else 1
    chosen = list(points[::stride])
    if points and chosen[-1] != points[-1]:
        chosen.append(points[-1])
    return chosen


class Accuracy(NamedTuple):
    """Of predictions: how far off the median one is, against the truth, and by which factor all but 1 %, either way."""

    num: int
    median_error: float
    p99_factor: float
    p99_later: float
    """By which factor it came later than predicted."""
    p99_sooner: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> "Accuracy":
        """Pairs of what was predicted and what came, both above 0; NaN where there are none."""
        errors = sorted(abs(predicted / real - 1) for predicted, real in pairs)
        later = sorted(real / predicted for predicted, real in pairs)
        sooner = sorted(predicted / real for predicted, real in pairs)
        factors = sorted(max(each, 1 / each) for each in later)
        return cls(len(pairs), percentile(errors, 50), *(percentile(each, 99) for each in (factors, later, sooner)))


def told_and_waited(records: Iterable[RequestRecord]) -> list[tuple[float, float]]:
    """(predicted, real) seconds from the sending that was let in to the first token."""
    return [
        (record.attempts[-1].predicted_s, record.token_times_s[0] - record.attempts[-1].sent_s)
        for record in records
        if record.token_times_s and record.attempts and record.attempts[-1].predicted_s is not None
    ]


def told_and_returned(records: Iterable[RequestRecord]) -> list[tuple[float, float]]:
    """(predicted, real) seconds from the first refusal to the first token, of those who were refused."""
    return [
        (record.attempts[0].predicted_s, record.token_times_s[0] - record.attempts[0].sent_s)
        for record in records
        if record.token_times_s and len(record.attempts) > 1 and record.attempts[0].predicted_s is not None
    ]


def first_time_share(records: Iterable[RequestRecord]) -> float:
    """Of those who were refused and obeyed, the share that was let in when it came back; 0 to 1."""
    times = [len(record.attempts) for record in records if len(record.attempts) > 1]
    return sum(num == 2 for num in times) / len(times) if times else math.nan
