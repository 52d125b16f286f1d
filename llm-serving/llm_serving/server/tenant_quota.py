"""Divides the memory or disk of a store among tenants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class TenantQuota:
    """Limits the bytes of each tenant to the bytes that are still free, so that no tenant can fill the store: dynamic
    thresholds (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998).
    """

    num_bytes: int
    is_shared: Callable[[], bool] = lambda: False
    key: str = "serving_config.batch_store_bytes"

    def room(self, used: int, own: int) -> int:
        """Return how many more bytes a tenant may use; may be negative. `used`: of all tenants. `own`: of this one."""
        free = self.num_bytes - used
        return (free - own) // 2 if self.is_shared() else free

    @property
    def rule(self) -> str:
        """The limit, in words that follow a subject such as "responses": "have at most 1000 bytes (KEY)"."""
        of_one = ", and those of one API key at most as many bytes as are free" if self.is_shared() else ""
        return f"have at most {self.num_bytes} bytes{of_one} ({self.key})"


class StoredSizes:
    """Sizes and tenants of a store's entries, oldest first. To make room for a new entry, it selects the oldest entries
    of the tenant that would use the most bytes. This is longest queue drop (Suter, Lakshman, Stiliadis and Choudhury,
    "Buffer management schemes for supporting TCP in gigabit routers with per-flow queueing", 1999).
    """

    def __init__(self, shares: TenantQuota) -> None:
        self._shares = shares
        self._all: dict[str, tuple[str, int]] = {}
        self._of_tenant: dict[str, dict[str, int]] = {}
        self._own: Counter[str] = Counter()
        self.num_bytes = 0

    def room(self, tenant: str) -> int:
        """Return how many bytes a tenant may still use without evicting an entry."""
        return self._shares.room(self.num_bytes, self._own[tenant])

    def add(self, name: str, tenant: str, num_bytes: int) -> None:
        self._all[name] = (tenant, num_bytes)
        self._of_tenant.setdefault(tenant, {})[name] = num_bytes
        self._own[tenant] += num_bytes
        self.num_bytes += num_bytes

    def remove(self, name: str) -> None:
        if name not in self._all:
            return
        tenant, num_bytes = self._all.pop(name)
        del self._of_tenant[tenant][name]
        self._own[tenant] -= num_bytes
        self.num_bytes -= num_bytes
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant], self._own[tenant]

    def evictions(self, tenant: str, num_bytes: int) -> list[str] | None:
        """Return the entries to evict before a tenant stores `num_bytes`. None if there cannot be enough room."""
        too_many = self.num_bytes + num_bytes - self._shares.num_bytes
        if too_many <= 0:
            return []
        names, is_shared = list[str](), self._shares.is_shared()
        of_all, oldest = iter(self._all), {owner: iter(own) for owner, own in self._of_tenant.items()}
        own = self._own + Counter({tenant: num_bytes})
        while too_many > 0:
            first = oldest.get(max(own, key=own.__getitem__), iter(())) if is_shared else of_all
            if (name := next(first, None)) is None:
                return None
            owner, size = self._all[name]
            names.append(name)
            own[owner] -= size
            too_many -= size
        return names
