"""Report the machine's device software, MindSpore, and optional packages."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from acceptance.device.outcome import Outcome, table

TITLE = "Environment"
ASCEND = Path("/usr/local/Ascend")
PACKAGES = ("mindspore", "mindspore-lite", "ms-custom-ops", "mindformers", "numpy")
NPU_SMI_LINES = 20
LIST_S = 60.0


def examine(device: str, ascend: Path = ASCEND, npu_smi: str = "npu-smi") -> Outcome:
    """Return the report; on Ascend it fails without driver, CANN or device.

    Args:
        device: cpu or ascend.
        ascend: Installation folder of the device software.
        npu_smi: The program that lists devices.
    """
    driver = version(ascend / "driver" / "version.info")
    toolkit = Path(os.environ.get("ASCEND_TOOLKIT_HOME", ascend / "ascend-toolkit" / "latest"))
    cann = version(toolkit / "version.cfg") or version(toolkit / "compiler" / "version.info")
    devices = listed(npu_smi)
    rows = [("device", device), ("system", platform.platform()), ("processor", processor())]
    rows += [("cores", str(os.cpu_count())), ("python", platform.python_version())]
    rows += [("driver", driver or "none"), ("CANN", cann or "none")]
    rows += [(name, installed(name)) for name in PACKAGES]
    lines = table(("what", "found"), rows)
    if devices:
        lines += ["", "```", *devices, "```"]
    faults = []
    if device == "ascend":
        if driver is None:
            faults.append(f"no driver of an NPU: {ascend}/driver/version.info is not there; install the driver")
        if cann is None:
            faults.append(f"no CANN: {toolkit} has no version; install the toolkit and source its set_env.sh")
        if not devices:
            result = "lists none" if devices is not None else f"does not end within {LIST_S:.0f} s"
            faults.append(f"no device: {npu_smi} info {result}; this user may lack access to /dev/davinci*")
    return Outcome(TITLE, lines, faults)


def version(path: Path) -> str | None:
    """Return the version in a file; None if the file is missing."""
    if not path.is_file():
        return None
    found = re.search(r"(?im)^\s*(?:version|.*_installed_version)\s*=\s*(\S+)", path.read_text(errors="replace"))
    return found[1] if found else "unknown"


def installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def processor() -> str:
    found = re.search(r"(?m)^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


def listed(npu_smi: str) -> list[str] | None:
    """Return the list of devices; empty if the program is missing or fails, None if it hangs."""
    program = shutil.which(npu_smi)
    if program is None:
        return []
    try:
        done = subprocess.run([program, "info"], capture_output=True, text=True, timeout=LIST_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.splitlines()[:NPU_SMI_LINES] if done.returncode == 0 else []
