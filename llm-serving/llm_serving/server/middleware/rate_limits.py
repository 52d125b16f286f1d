"""Rate limits of API keys: requests and tokens per minute, enforced by token buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llm_serving.config.tables import ApiKey
from llm_serving.core.timings import Clock
from llm_serving.errors import RateLimitError


class TokenBucket:
    """A token bucket that starts full and gains `per_s` tokens a second, by default `capacity` a minute. More can be
    withdrawn than it holds.
    """

    def __init__(self, capacity: float, now: float, per_s: float | None = None) -> None:
        self.capacity = capacity
        self._per_s = capacity / 60.0 if per_s is None else per_s
        self._level = capacity
        self._at = now

    def resized(self, capacity: float, now: float) -> TokenBucket:
        other = TokenBucket(capacity, now)
        other._level = min(capacity, self.level(now))
        return other

    def level(self, now: float) -> float:
        return min(self.capacity, self._level + (now - self._at) * self._per_s)

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` can be withdrawn. An amount above the capacity waits for a full bucket."""
        return max(0.0, (min(amount, self.capacity) - self.level(now)) / self._per_s)

    def take(self, amount: float, now: float) -> None:
        self._level, self._at = self.level(now) - amount, now


class LineBudget:
    """Limits log lines: `burst` at once, then `per_second` a second. It counts the suppressed lines."""

    def __init__(self, burst: int, per_second: float) -> None:
        self._bucket = TokenBucket(burst, 0.0, per_second)
        self._num_suppressed = 0

    def take(self, now: float) -> int | None:
        """Count a line. Return None if it must be suppressed, else how many lines were suppressed just before it."""
        if self._bucket.level(now) < 1.0:
            self._num_suppressed += 1
            return None
        self._bucket.take(1.0, now)
        suppressed, self._num_suppressed = self._num_suppressed, 0
        return suppressed


class Quota:
    """The rate limits of one API key, used by the event loop only. A request withdraws its prompt tokens and the
    maximum number of tokens that it may generate. At its end, the tokens that it did not generate are refunded. A
    request that needs more than the limit per minute waits for a full bucket.
    """

    def __init__(self, key: ApiKey, clock: Clock) -> None:
        self._name = key.name
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}
        self.reload(key)

    def reload(self, key: ApiKey) -> None:
        now, before = self._clock(), self._buckets
        limits = {"requests": key.max_requests_per_minute, "tokens": key.max_tokens_per_minute}
        self._buckets = {
            what: before[what].resized(limit, now) if what in before else TokenBucket(limit, now)
            for what, limit in limits.items()
            if limit is not None
        }

    def take_request(self) -> None:
        """Count one request. Raise RateLimitError if that exceeds the limit per minute."""
        self._take("requests", 1)

    def take_tokens(self, num_prompt: int, num_output: int) -> Callable[[int], None] | None:
        """Withdraw the tokens of a request, or raise RateLimitError. Return a function that refunds unused tokens when
        it gets the number of generated tokens at the request's end. Return None if there is no limit.
        """
        if "tokens" not in self._buckets:
            return None
        self._take("tokens", num_prompt + num_output)

        def refund(num_generated: int) -> None:
            if (bucket := self._buckets.get("tokens")) is not None:
                bucket.take(num_generated - num_output, self._clock())

        return refund

    def headers(self) -> dict[str, str]:
        """Return OpenAI's `x-ratelimit-*` headers: each limit, what remains of it, and when it is full again."""
        now = self._clock()
        found = {}
        for what, bucket in self._buckets.items():
            found[f"x-ratelimit-limit-{what}"] = f"{bucket.capacity:.0f}"
            found[f"x-ratelimit-remaining-{what}"] = f"{max(0, int(bucket.level(now)))}"
            found[f"x-ratelimit-reset-{what}"] = f"{bucket.wait_s(bucket.capacity, now):.3f}s"
        return found

    def _take(self, what: str, amount: int) -> None:
        bucket = self._buckets.get(what)
        if bucket is None:
            return
        now = self._clock()
        wait_s = bucket.wait_s(amount, now)
        if wait_s > 0.0:
            place = f"api_keys.{self._name}.max_{what}_per_minute"
            limit = f"{bucket.capacity:.0f} {what} a minute ({place})"
            raise RateLimitError(f"{amount} more would exceed {limit}; {max(0, int(bucket.level(now)))} remain", wait_s)
        bucket.take(amount, now)


def update_quotas(quotas: dict[str, Quota], keys: Sequence[ApiKey], clock: Clock) -> None:
    """Update `quotas` (name of the API key -> quota) to those of `keys`. The usage of a key stays counted."""
    for key in keys:
        if key.name in quotas:
            quotas[key.name].reload(key)
        else:
            quotas[key.name] = Quota(key, clock)
    for name in quotas.keys() - {key.name for key in keys}:
        del quotas[name]
