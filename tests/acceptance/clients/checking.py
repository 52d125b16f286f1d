"""What every client's file uses: it runs in an environment of its own, with the standard library alone."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from importlib.metadata import distributions

URL = os.environ.get("ACCEPTANCE_URL", "http://127.0.0.1:8835")
MODEL = os.environ.get("ACCEPTANCE_MODEL", "demo")
CITIES = ["Zurich", "Oslo"]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,  # the shipped model would think of others without end
}


def package(*names: str) -> None:
    """Tells which version of the client runs; it may be distributed by any of these names."""
    version = next(each.version for name in names for each in distributions(name=name))
    print(json.dumps({"version": version}), flush=True)


def check(what: str, own_fault: str = "") -> Callable[[Callable[[], object]], None]:
    """Runs a function at once, and tells whether it went well and gave something.

    An error that begins with `own_fault` is one that the client makes with every server; it may also be mended there.
    """

    def run(function: Callable[[], object]) -> None:
        try:
            result = function()
            error = "" if result else f"gave {result!r}"
        except Exception as caught:  # noqa: BLE001  whatever a client raises is what it comes to
            error = f"{type(caught).__name__}: {' '.join(str(caught).split())[:300]}{last_lines(caught)}"
        excused = bool(own_fault) and error.startswith(own_fault)
        print(json.dumps({"what": what, "error": error, "excused": excused}), flush=True)

    return run


def last_lines(error: Exception) -> str:
    """What a tool that failed wrote last, or nothing."""
    if not isinstance(error, subprocess.CalledProcessError) or not error.stderr:
        return ""
    text = error.stderr if isinstance(error.stderr, str) else error.stderr.decode(errors="replace")
    return f": {' / '.join(line.strip() for line in text.strip().splitlines()[-3:])[-600:]}"
