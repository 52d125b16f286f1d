"""First tokens by the server's own clock: when they came, and where the time before them went."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from http_client import HttpClient
from records import RequestRecord

from experiments.server import ServerError

OUTSIDE: Final = "outside the server"
SOONER: Final = "sooner than predicted"
WHERE: Final[Mapping[str, str]] = {
    "tokenizing": "at its door",
    "inbox": "steps under way",
    "device": "steps under way",
    "queued": "queue",
    "prefill": "own step",
}
"""By parts of an explanation that come before a first token."""
PLACES: Final = tuple(dict.fromkeys(WHERE.values()))


class FirstToken(NamedTuple):
    """One answer's; seconds."""

    sent_s: float
    """Of the run."""
    predicted_s: float
    seen_s: float
    """From its sending until the client had it."""
    real_s: float
    """From the door until the engine gave it out, by the server's own clock."""
    spent_s: Mapping[str, float]
    """By `PLACES`."""

    @property
    def factor(self) -> float:
        """Between what was predicted and what the client saw, either way."""
        return max(self.predicted_s / self.seen_s, self.seen_s / self.predicted_s)

    @property
    def cause(self) -> str:
        """Where most of the time went, of one that came late."""
        if self.predicted_s > self.seen_s:
            return SOONER
        spent_s = {OUTSIDE: self.seen_s - self.real_s, **self.spent_s}
        return max(spent_s, key=spent_s.__getitem__)


async def first_tokens(http: HttpClient, records: Sequence[RequestRecord]) -> list[FirstToken]:
    """Asks for the explanation of every answer that had a prediction; in order of their sending.

    Raises:
        ServerError: The server has none of a request.
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
    """From one of the `requests` of an explanation."""
    attempt = record.attempts[-1]
    assert attempt.predicted_s is not None
    spent_s = dict.fromkeys(PLACES, 0.0)
    for part in explanation["parts"]:
        if part["what"] in WHERE:
            spent_s[WHERE[part["what"]]] += part["ms"] / 1000
    seen_s = record.token_times_s[0] - attempt.sent_s
    return FirstToken(
        attempt.sent_s, attempt.predicted_s, seen_s, explanation["first_token"]["real_ms"] / 1000, spent_s
    )


def worst(found: Sequence[FirstToken], share: float = 0.01) -> list[FirstToken]:
    """That share of them whose predictions were farthest off, at least one; the farthest first."""
    return sorted(found, key=lambda each: each.factor, reverse=True)[: max(1, round(share * len(found)))]
