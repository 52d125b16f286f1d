"""How much of the machine was not to be had while something was measured."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class LostCores:
    """Mean number of cores that other programs used, and that the host of a virtual machine gave to others."""

    programs: float
    host: float


class LostCoresMeter:
    """Counts from its making."""

    def __init__(self) -> None:
        self._start, self._counts = time.perf_counter(), _cpu_seconds()

    def read(self) -> LostCores:
        elapsed = time.perf_counter() - self._start
        busy, own, stolen = (now - then for now, then in zip(_cpu_seconds(), self._counts, strict=True))
        return LostCores(max(0.0, busy - own) / elapsed, stolen / elapsed)


def _cpu_seconds() -> tuple[float, float, float]:
    """Since the machine started: used by all programs, used by this one, stolen."""
    user, nice, system, _, _, irq, softirq, stolen = (
        int(field) / _TICKS for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return user + nice + system + irq + softirq, time.process_time(), stolen
