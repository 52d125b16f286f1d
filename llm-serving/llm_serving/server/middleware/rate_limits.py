"""Rate limits of API keys: requests and tokens per minute, by token buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llm_serving.config.tables import ApiKey
from llm_serving.core.timings import Clock
from llm_serving.errors import RateLimitError


class TokenBucket:
    """Holds `capacity` at most, is full at first, and gains that much a minute.

    What is taken may exceed what there is: the level falls below 0 and rises again with time.
    """

    def __init__(self, capacity: float, now: float) -> None:
        self.capacity = capacity
        self._per_s = capacity / 60.0
        self._level = capacity
        self._at = now

    def resized(self, capacity: float, now: float) -> TokenBucket:
        """One of another capacity with what is in this one, as far as it has room for it."""
        other = TokenBucket(capacity, now)
        other._level = min(capacity, self.level(now))
        return other

    def level(self, now: float) -> float:
        return min(self.capacity, self._level + (now - self._at) * self._per_s)

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until there is so much; of more than it can hold, until it is full. 0: there is."""
        return max(0.0, (min(amount, self.capacity) - self.level(now)) / self._per_s)

    def take(self, amount: float, now: float) -> None:
        """Takes so much; a negative amount is given back."""
        self._level, self._at = self.level(now) - amount, now


class Quota:
    """The limits of one key, counted on the event loop; each may be absent.

    Tokens are taken when a request comes, as many as it may become: its prompts and all it may generate. What it did
    not generate is given back at its end. A request that is larger than the limit of a minute waits for a whole one.
    """

    def __init__(self, key: ApiKey, clock: Clock) -> None:
        self._name = key.name
        self._clock = clock
        now = clock()
        limits = {"requests": key.max_requests_per_minute, "tokens": key.max_tokens_per_minute}
        self._buckets = {what: TokenBucket(limit, now) for what, limit in limits.items() if limit is not None}

    def reload(self, key: ApiKey) -> None:
        """From now on other limits count; what was taken stays taken."""
        now = self._clock()
        before, self._buckets = self._buckets, Quota(key, self._clock)._buckets
        for what, bucket in self._buckets.items():
            if what in before:
                self._buckets[what] = before[what].resized(bucket.capacity, now)

    def take_request(self) -> None:
        """One request has come.

        Raises:
            RateLimitError: It is one too many.
        """
        self._take("requests", 1)

    def take_tokens(self, num_prompt: int, num_output: int) -> Callable[[int], None] | None:
        """A request wants to generate so many tokens at most.

        Returns:
            To be called at its end with the number it has generated; None where tokens are not limited.

        Raises:
            RateLimitError: They are too many for now.
        """
        if "tokens" not in self._buckets:
            return None
        self._take("tokens", num_prompt + num_output)
        return lambda num_generated: self._give_back("tokens", num_output - num_generated)

    def headers(self) -> dict[str, str]:
        """Limits, what is left of them and how long until all is, by the names that OpenAI gave them."""
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
            raise RateLimitError(
                f"{amount} more would exceed {limit}; {max(0, int(bucket.level(now)))} are left", wait_s
            )
        bucket.take(amount, now)

    def _give_back(self, what: str, amount: int) -> None:
        """To the limit that counts by then."""
        if (bucket := self._buckets.get(what)) is not None:
            bucket.take(-amount, self._clock())


def reload_quotas(quotas: dict[str, Quota], keys: Iterable[ApiKey], clock: Clock) -> None:
    """Makes `quotas` those of other keys; tenants that stay keep what they have used."""
    after = quotas_of(keys, clock)
    for key in keys:
        if key.name in after and key.name in quotas:
            quotas[key.name].reload(key)
            after[key.name] = quotas[key.name]
    quotas.clear()
    quotas.update(after)


def quotas_of(keys: Iterable[ApiKey], clock: Clock) -> dict[str, Quota]:
    """Name of a key -> what it may ask for; keys without limits are not there."""
    return {
        key.name: Quota(key, clock)
        for key in keys
        if (key.max_requests_per_minute, key.max_tokens_per_minute) != (None, None)
    }
