"""Request classes, and the caller of a request."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from msgspec import Struct

from llm_serving.core.timings import HttpTimings

MAX_PRIORITY: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestClass:
    """One row of `request_classes` in the YAML."""

    name: str
    rank: int
    """Position among the classes: a smaller rank is scheduled first. A request's `priority` (smaller is earlier,
    default 0) selects the class with the largest rank up to the priority. Each class has its own rank. Required."""
    service_tier: str | None = None
    """Value of the request field `service_tier` (OpenAI's, Anthropic's) that selects the class, such as `flex` or
    `priority`. If no class has a tier, the server ignores the field and lists it in the header `x-ignored-parameters`.
    null: no value selects this class."""
    weight: int = 1
    """Share of running slots and tokens, relative to the weights of the other classes. It applies while requests of the
    class have waited for longer than `ageing_steps`; before that, classes of smaller rank are scheduled first."""
    ageing_steps: int = 256
    """Number of steps after which the class shares with higher classes by weight; before that, higher classes go first.
    Counted while the oldest request of the class waits for a running slot, or for its prefill while it has a slot."""
    ttft_slo_s: float | None = None
    """SLO in seconds for the time to first token. null: no SLO."""
    tpot_slo_s: float | None = None
    """SLO in seconds for the time per output token after the first. null: no SLO."""
    max_waiting: int | None = None
    """Maximum number of waiting requests of the class; further ones are refused with 429. null: only
    `scheduler_config.max_waiting_queue` applies."""
    max_running_share: float = 1.0
    """Maximum fraction of the running slots that the class holds."""
    max_kv_share: float = 1.0
    """Fraction of the KV blocks up to which requests of the class are admitted. Running requests may exceed it."""


STANDARD: Final = RequestClass(name="standard", rank=0, weight=4, ageing_steps=256, ttft_slo_s=5.0, tpot_slo_s=0.2)
_RANK: Final = attrgetter("rank")
DEFAULT_CLASSES: Final = (
    RequestClass(name="interactive", rank=-1, weight=8, ageing_steps=64, ttft_slo_s=1.0, tpot_slo_s=0.1),
    STANDARD,
    RequestClass(name="batch", rank=1, weight=1, ageing_steps=1024),
)


def class_of(priority: int, classes: Sequence[RequestClass]) -> RequestClass:
    """Return the last of the `classes` (by ascending rank) whose rank is not above `priority`, or else the first."""
    return classes[max(0, bisect_right(classes, priority, key=_RANK) - 1)]


class Caller(Struct, frozen=True, eq=False):
    """The client of a request, how urgent the request is, and which adapter it names."""

    priority: int = 0
    """From -`MAX_PRIORITY` to `MAX_PRIORITY`. The server checks it, since it knows the header or field that gave it."""
    tenant: str = ""
    cache_salt: str = ""
    source: str = ""
    """Client whose retries are spread over time: name of the API key, or the client's network."""
    deadline: float | None = None
    http_timings: HttpTimings | None = None
    adapter: int = 0


def cache_namespace(tenant: str, cache_salt: str, adapter: int = 0) -> str:
    return f"{adapter} {len(tenant)} {tenant}{cache_salt}"


ANONYMOUS: Final = Caller()
