"""What one tenant may take of the room that all have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Shares:
    """Of several tenants each has at most as much as it leaves free, so that nobody can fill everything.

    These are dynamic thresholds: Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet
    switches", IEEE/ACM Transactions on Networking 6 (2), 1998.
    """

    num_bytes: int
    """Of all together."""
    is_shared: Callable[[], bool] = lambda: False
    """Whether there are several tenants."""

    def room(self, used: int, own: int) -> int:
        """Bytes that a tenant may still take; below 0 where it has more than it may.

        Args:
            used: By all.
            own: Of these, by the tenant.
        """
        free = self.num_bytes - used
        return (free - own) // 2 if self.is_shared() else free

    @property
    def rule(self) -> str:
        """Worded for an error, behind what it holds for."""
        of_one = ", and those of one API key at most as many as they leave free" if self.is_shared() else ""
        return f"have at most {self.num_bytes} bytes{of_one} (serving_config.batch_store_bytes)"
