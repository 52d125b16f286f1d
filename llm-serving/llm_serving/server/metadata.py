"""What clients give responses and batches to keep beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llm_serving.errors import RequestError

MAX_PAIRS: Final = 16
"""As with OpenAI; so are the lengths."""
MAX_KEY_CHARS: Final = 64
MAX_VALUE_CHARS: Final = 512


def check_metadata(pairs: Mapping[str, str] | None) -> None:
    """Raises RequestError where it is too much."""
    if not pairs:
        return
    longest = max(map(len, pairs)), max(map(len, pairs.values()))
    if len(pairs) > MAX_PAIRS or longest[0] > MAX_KEY_CHARS or longest[1] > MAX_VALUE_CHARS:
        rule = f"must hold at most {MAX_PAIRS} pairs, keys of {MAX_KEY_CHARS} and values of "
        raise RequestError("metadata", f"{rule}{MAX_VALUE_CHARS} characters at most", len(pairs))
