"""Figures over the records of trials, and the first-token times that the server itself reports."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from experiments.bench import ServerError
from load_test.http_client import HttpClient
from load_test.metrics import RequestRecord, ServiceLevel, percentile


def by_group(records: Iterable[RequestRecord]) -> dict[str, list[RequestRecord]]:
    groups: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in records:
        groups[record.task].append(record)
    return dict(groups)


def idle_share(num_tokens: float, num_steps: float, num_slots: int) -> float:
    """Return the share of slots that produced no token, over all steps; 0 to 1."""
    return 1.0 - num_tokens / (num_steps * num_slots)


def saturated_rate(records: Sequence[RequestRecord]) -> float:
    """Return the sustainable requests per second, from a load that was sent all at once.

    Tokens are counted until the last request gets its first one. Until then requests waited and no slot was empty.
    """
    until_s = max(record.token_times_s[0] for record in records)
    num_tokens = sum(time_s <= until_s for record in records for time_s in record.token_times_s)
    tokens_per_request = sum(len(record.token_times_s) for record in records) / len(records)
    return num_tokens / until_s / tokens_per_request


def met_share(records: Sequence[RequestRecord], level: ServiceLevel) -> float:
    """Return the share of requests that met their targets, 0 to 1; a failed request meets none."""
    return sum(level.met_by(record) for record in records) / len(records)


def goodput_per_s(records: Iterable[RequestRecord], levels: Mapping[str, ServiceLevel], span_s: float) -> float:
    """Return the requests per second that met the targets of their group."""
    return sum(levels[record.task].met_by(record) for record in records) / span_s


def served_tokens(
    records: Iterable[RequestRecord], num_prompt_tokens: Mapping[str, int], until_s: float | None = None
) -> list[tuple[float, int]]:
    """Return (second, tokens served until then) of each event; a prompt counts when its first token arrives.

    Args:
        records: Records of one tenant.
        num_prompt_tokens: Prompt -> number of tokens.
        until_s: Last second of the run that counts; None: all of it.
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
    """Return the inter-token latencies of all requests in milliseconds, before second `until_s`."""
    times = (record.token_times_s for record in records)
    return [1e3 * (after - before) for each in times for before, after in pairwise(each) if before < until_s]


def per_second(records: Iterable[RequestRecord], until_s: int) -> list[int]:
    """Return the number of requests that finished in each second of the run."""
    ended = Counter(int(record.end_s) for record in records if record.ok)
    return [ended[second] for second in range(until_s)]


def thinned(points: Sequence[tuple[float, int]], most: int) -> list[tuple[float, int]]:
    """Return about `most` evenly chosen points, including the last."""
    stride = -(-len(points) // most) if points else 1
    chosen = list(points[::stride])
    if points and chosen[-1] != points[-1]:
        chosen.append(points[-1])
    return chosen


class Accuracy(NamedTuple):
    """Accuracy of predictions: the median relative error, and the factor that 99 % of them are within."""

    num: int
    median_error: float
    p99_factor: float
    p99_later: float
    """Factor by which 99 % came at most later than predicted."""
    p99_sooner: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Accuracy:
        """Compute it from (predicted, measured) pairs of positive values; NaN without pairs."""
        errors = sorted(abs(predicted / real - 1) for predicted, real in pairs)
        later = sorted(real / predicted for predicted, real in pairs)
        sooner = sorted(predicted / real for predicted, real in pairs)
        factors = sorted(max(each, 1 / each) for each in later)
        return cls(len(pairs), percentile(errors, 50), *(percentile(each, 99) for each in (factors, later, sooner)))


def predicted_after_admission(records: Iterable[RequestRecord]) -> list[tuple[float, float]]:
    """Return (predicted, measured) seconds from the admitted attempt to the first token."""
    return [
        (record.attempts[-1].predicted_s, record.token_times_s[0] - record.attempts[-1].sent_s)
        for record in records
        if record.token_times_s and record.attempts and record.attempts[-1].predicted_s is not None
    ]


def predicted_after_refusal(records: Iterable[RequestRecord]) -> list[tuple[float, float]]:
    """Return (predicted, measured) seconds from the first refusal to the first token, of refused requests."""
    return [
        (record.attempts[0].predicted_s, record.token_times_s[0] - record.attempts[0].sent_s)
        for record in records
        if record.token_times_s and len(record.attempts) > 1 and record.attempts[0].predicted_s is not None
    ]


def first_retry_share(records: Iterable[RequestRecord]) -> float:
    """Return the share of refused requests that were admitted at their first retry; 0 to 1."""
    times = [len(record.attempts) for record in records if len(record.attempts) > 1]
    return sum(num == 2 for num in times) / len(times) if times else math.nan


OUTSIDE: Final = "outside the server"
SOONER: Final = "sooner than predicted"
PHASE_OF: Final[Mapping[str, str]] = {
    "tokenizing": "admission",
    "inbox": "running steps",
    "device": "running steps",
    "queued": "queue",
    "prefill": "own step",
}
"""Part of an explanation -> phase before the first token."""
PHASES: Final = tuple(dict.fromkeys(PHASE_OF.values()))


class FirstToken(NamedTuple):
    """Times of one first token, in seconds."""

    sent_s: float
    """Second of the run."""
    predicted_s: float
    seen_s: float
    """From sending the request until the client received it."""
    real_s: float
    """From admission until the engine published it, by the server's clock."""
    spent_s: Mapping[str, float]
    """Phase -> seconds, see `PHASES`."""

    @property
    def factor(self) -> float:
        """Factor between the prediction and the client's measurement, at least 1."""
        return max(self.predicted_s / self.seen_s, self.seen_s / self.predicted_s)

    @property
    def cause(self) -> str:
        """Phase that took most of the time of a late first token."""
        if self.predicted_s > self.seen_s:
            return SOONER
        spent_s = {OUTSIDE: self.seen_s - self.real_s, **self.spent_s}
        return max(spent_s, key=spent_s.__getitem__)


async def first_tokens(http: HttpClient, records: Sequence[RequestRecord]) -> list[FirstToken]:
    """Fetch the explanation of every answer with a prediction, in the order of sending.

    Raises:
        ServerError: The server has no explanation of a request.
    """
    found = []
    for record in sorted(records, key=lambda each: each.sent_s):
        if not (record.token_times_s and record.attempts) or record.attempts[-1].predicted_s is None:
            continue
        attempt = record.attempts[-1]
        response = await http.request("GET", f"/v1/requests/{attempt.request_id}/explain")
        if response.status != 200:
            raise ServerError(f"GET /v1/requests/{attempt.request_id}/explain answered HTTP {response.status}")
        found.append(parse(record, json.loads(response.body)["requests"][0]))
    return found


def parse(record: RequestRecord, explanation: Mapping[str, Any]) -> FirstToken:
    attempt = record.attempts[-1]
    assert attempt.predicted_s is not None
    spent_s = dict.fromkeys(PHASES, 0.0)
    for part in explanation["parts"]:
        if part["what"] in PHASE_OF:
            spent_s[PHASE_OF[part["what"]]] += part["ms"] / 1000
    seen_s = record.token_times_s[0] - attempt.sent_s
    return FirstToken(
        attempt.sent_s, attempt.predicted_s, seen_s, explanation["first_token"]["real_ms"] / 1000, spent_s
    )


def worst_predictions(found: Sequence[FirstToken], share: float = 0.01) -> list[FirstToken]:
    """Return the share of first tokens with the largest prediction errors, at least one, largest first."""
    return sorted(found, key=lambda each: each.factor, reverse=True)[: max(1, round(share * len(found)))]
