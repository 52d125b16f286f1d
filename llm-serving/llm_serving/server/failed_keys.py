"""Wrong API keys: each address may show a few, what comes after is not looked at, and the log says so now and then."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, TypeVar

from llm_serving.core.clock import Clock
from llm_serving.errors import RateLimitError
from llm_serving.log import get_logger
from llm_serving.server.front_door.guests import network_of
from llm_serving.server.token_bucket import TokenBucket

logger = get_logger(__name__)

WRONG_KEYS_PER_MINUTE: Final = 20
MAX_ADDRESSES: Final = 4096
"""Addresses that are remembered, the newest; of IPv6 the first half, which is one customer's."""
LOG_INTERVAL_S: Final = 10.0


class FailedKeys:
    """Counts on the event loop.

    Args:
        clock: Seconds.
        refused: Told of each refusal, by its reason: `missing_key`, `unknown_key` or `too_many_unknown_keys`.
    """

    def __init__(self, clock: Clock, refused: Callable[[str], None]) -> None:
        self._clock = clock
        self._refused = refused
        self._addresses: OrderedDict[str, TokenBucket] = OrderedDict()
        self._good: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        """(address, hash of a known key) of requests that were let in: they are, whoever else fails there."""
        self._num_unlogged = 0
        self._logged_at = -LOG_INTERVAL_S

    def check(self, client: str, digest: bytes) -> None:
        """Raises RateLimitError unless a key of this hash may be tried from this address."""
        address = network_of(client)
        bucket = self._addresses.get(address)
        if bucket is None or (address, digest) in self._good:
            return
        wait_s = bucket.wait_s(1.0, self._clock())
        if wait_s > 0.0:
            self._count("too_many_unknown_keys", address)
            raise RateLimitError("too many API keys that are not known came from this address", wait_s)

    def failed(self, client: str, *, shown: bool) -> None:
        """A request had no key that is known; `shown`: it had one."""
        address = network_of(client)
        if shown:
            now = self._clock()
            bucket = self._addresses.get(address) or TokenBucket(WRONG_KEYS_PER_MINUTE, now)
            bucket.take(1.0, now)
            _remember(self._addresses, address, bucket)
        self._count("unknown_key" if shown else "missing_key", address)

    def succeeded(self, client: str, digest: bytes) -> None:
        """A request had a known key of this hash."""
        _remember(self._good, (network_of(client), digest), None)

    def _count(self, reason: str, address: str) -> None:
        self._refused(reason)
        self._num_unlogged += 1
        now = self._clock()
        if now - self._logged_at >= LOG_INTERVAL_S:
            logger.warning(
                "%d requests without a known API key were refused; the last one came from %s",
                self._num_unlogged,
                address,
            )
            self._num_unlogged, self._logged_at = 0, now


K = TypeVar("K")
V = TypeVar("V")


def _remember(table: OrderedDict[K, V], key: K, value: V) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > MAX_ADDRESSES:
        table.popitem(last=False)
