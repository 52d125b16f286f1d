"""A row of `api_keys`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One row of `api_keys`: a tenant, who shows a key."""

    name: str
    key_sha256: str
    """SHA-256 of the key, 64 hexadecimal digits; the key itself stands nowhere."""
    highest_class: str | None = None
    """Requests of a better class, or with a priority before this class's rank, are refused with 403. None: no limit."""
    max_waiting: int | None = None
    """Most of its requests that wait to be scheduled. None: only the other limits count."""
    max_running: int | None = None
    """Most of its requests that run at once, at all WorkAgents together. None:
    `scheduler_config.max_running_per_tenant`."""
    admin: bool = False
    """Whether it sees and controls everybody's requests, not only its own."""
    max_requests_per_minute: int | None = None
    """Requests a minute, in bursts of as many; beyond, they are refused with 429. None: no limit."""
    max_tokens_per_minute: int | None = None
    """Tokens a minute, of prompts and of what may be generated; what is not generated is given back. None: no limit."""
