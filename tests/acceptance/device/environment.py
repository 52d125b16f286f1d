"""Report the commit, the machine's device software, MindSpore, optional packages, and MindSpore's warnings."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from acceptance.device.outcome import Outcome, reason, table

TITLE = "Environment"
ASCEND = Path("/usr/local/Ascend")
PROJECT = Path(__file__).resolve().parents[3]
PACKAGES = ("mindspore", "mindspore-lite", "ms-custom-ops", "mindformers", "numpy", "llm-serving")
WARNINGS = "Warnings of MindSpore and CANN"
WARNING = re.compile(r"\[(WARNING|ERROR|CRITICAL)\] *(\w+)\(.*?\):?[\d:. -]*(.*)")
"""A line such as `[WARNING] ME(pid:thread,process):time [file:line] text`."""
MAX_WARNINGS = 40
CANN_VERSIONS = ("8.2", "8.3", "8.5", "9.0", "9.1")
"""Versions of CANN that MindSpore 2.10 accepts without a warning (`mindspore/run_check/_check_version.py`)."""
COMPILER = "from te import version"
"""Import of CANN's operator compiler, which MindSpore needs."""
NPU_SMI_LINES = 20
LIST_S = 60.0


def examine(device: str, command: Sequence[str] = (), ascend: Path = ASCEND, npu_smi: str = "npu-smi") -> Outcome:
    """Return the report; on Ascend it fails without driver, CANN or device.

    Args:
        device: cpu or ascend.
        command: Command of this acceptance.
        ascend: Installation folder of the device software.
        npu_smi: The program that lists devices.
    """
    driver = version(ascend / "driver" / "version.info")
    toolkit = Path(os.environ.get("ASCEND_TOOLKIT_HOME", ascend / "ascend-toolkit" / "latest"))
    cann = version(toolkit / "version.cfg") or version(toolkit / "compiler" / "version.info")
    devices = listed(npu_smi)
    rows = [
        ("date", f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"),
        ("commit", commit()),
        ("command", shlex.join(command)),
    ]
    rows += [("device", device), ("system", platform.platform()), ("processor", processor())]
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
        else:
            faults += wrong_cann(cann, toolkit)
        if not devices:
            result = "lists none" if devices is not None else f"does not end within {LIST_S:.0f} s"
            faults.append(f"no device: {npu_smi} info {result}; this user may lack access to /dev/davinci*")
    return Outcome(TITLE, lines, faults)


def wrong_cann(cann: str, toolkit: Path) -> list[str]:
    """Return what is wrong with an installed CANN: its version, its variables or its Python packages."""
    faults = []
    if ".".join(cann.split(".")[:2]) not in CANN_VERSIONS:
        faults.append(f"CANN {cann} is none of those that MindSpore 2.10 accepts: {', '.join(CANN_VERSIONS)}")
    if "ASCEND_OPP_PATH" not in os.environ:
        faults.append(f"CANN's variables are not set: source {toolkit.parent}/set_env.sh in this shell")
        return faults
    done = subprocess.run([sys.executable, "-c", COMPILER], capture_output=True, text=True, timeout=LIST_S, check=False)
    if done.returncode != 0:
        why = reason(done.stderr)
        faults.append(f"CANN's operator compiler cannot be imported, {why}: install the extra `ascend` of this project")
    return faults


def commit(project: Path = PROJECT) -> str:
    """Return the commit that runs, and whether files differ from it; unknown without git."""
    try:
        found = [
            subprocess.run(["git", "-C", str(project), *arguments], capture_output=True, text=True, check=True).stdout
            for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{found[0].strip()}{' with changes' if found[1].strip() else ''}"


def warnings_of(logs: Path) -> Outcome:
    """Return the different warnings and errors in the logs of all processes, with their counts. Numbers are left out of
    the comparison.
    """
    counts, examples = Counter[str](), dict[str, str]()
    for path in sorted(logs.rglob("*.log")):
        for level, module, text in WARNING.findall(path.read_text(errors="replace")):
            key = re.sub(r"\d+", "N", f"{level} {module} {text}")
            counts[key] += 1
            examples.setdefault(key, f"{level} {module}: {text.strip()[:200]}")
    rows = [(count, examples[key]) for key, count in counts.most_common(MAX_WARNINGS)]
    lines = table(("times", "first one of its kind"), rows) if rows else ["none"]
    return Outcome(WARNINGS, [*lines, "", f"All logs are in {logs}."])


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
