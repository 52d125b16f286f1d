"""Helpers of the files for each client, which run in environments of their own with the standard library only."""

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
    "additionalProperties": False,  # otherwise the shipped model would generate properties without end
}


def package(*names: str) -> None:
    """Print the version of the client, which may be installed under any of these names."""
    version = next(each.version for name in names for each in distributions(name=name))
    print(json.dumps({"version": version}), flush=True)


def check(what: str, own_fault: str = "") -> Callable[[Callable[[], object]], None]:
    """Run a function at once, and print whether it succeeded and returned a true value.

    An error that starts with `own_fault` is a fault of the client with every server; the client may also have fixed it.
    """

    def run(function: Callable[[], object]) -> None:
        try:
            result = function()
            error = "" if result else f"gave {result!r}"
        except Exception as caught:  # noqa: BLE001  any exception of a client is its result
            error = f"{type(caught).__name__}: {' '.join(str(caught).split())[:300]}{last_lines(caught)}"
        excused = bool(own_fault) and error.startswith(own_fault)
        print(json.dumps({"what": what, "error": error, "excused": excused}), flush=True)

    return run


def last_lines(error: Exception) -> str:
    """Return the last lines that a failed tool wrote, if any."""
    if not isinstance(error, subprocess.CalledProcessError) or not error.stderr:
        return ""
    text = error.stderr if isinstance(error.stderr, str) else error.stderr.decode(errors="replace")
    return f": {' / '.join(line.strip() for line in text.strip().splitlines()[-3:])[-600:]}"
