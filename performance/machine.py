"""What a result was measured on."""

import platform
from pathlib import Path


def describe() -> dict[str, str]:
    return {"platform": platform.platform(), "processor": _processor(), "python": platform.python_version()}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()
