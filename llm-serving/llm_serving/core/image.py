"""Which code a process runs: a hash over the files of this package."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Final

_PACKAGE: Final = Path(__file__).resolve().parents[1]
_CODE: Final = (".py", ".cc", ".h")


@cache
def package_image() -> str:
    """SHA-256 over path and content of each source file, Python and C++, as it was when this was first asked for.

    Processes of one server must have the same: an answer is a function of the code as well.
    """
    image = hashlib.sha256()
    for path in sorted(each for each in _PACKAGE.rglob("*") if each.suffix in _CODE):
        content = path.read_bytes()
        image.update(f"{path.relative_to(_PACKAGE).as_posix()} {len(content)}\n".encode())
        image.update(content)
    return image.hexdigest()
