"""How much a JSON text consists of, found without building any of it.

Reading JSON is one call that nothing interrupts: while it runs, no other request is served. What it takes depends less
on the bytes than on what they stand for: a list inside a list costs as much as a hundred letters of a text. So whoever
reads a body counts first, in calls that are short for any bytes.
"""

from __future__ import annotations

from typing import Final

from llm_serving.errors import RequestError

MAX_VALUES: Final = 2**19
"""Numbers, texts and all others: token ids of a batch of long prompts. Reading so many takes about 6 ms."""
MAX_TEXTS: Final = 2**16
"""Strings, names included: about 5 ms."""
MAX_CONTAINERS: Final = 2**15
"""Lists, objects and names of fields, each about 0.5 microseconds at worst: more than 4,096 messages in parts have."""
MAX_DIGITS: Final = 64
"""In a row: the time that reading an integer takes grows with the square of them."""

_DIGITS_TO_ZERO: Final = bytes.maketrans(b"123456789", b"000000000")


def check_census(body: bytes) -> None:
    """Refuses a body that would take long to read, whatever its bytes; one that is no JSON may pass.

    Raises:
        RequestError: Names what there is too much of.
    """
    # Commas inside texts count too, so that most bodies are done with here.
    if _num_structural(body) <= MAX_CONTAINERS and body.count(b'"') <= 2 * MAX_TEXTS and not _has_long_number(body):
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote left begins or ends a text
    if plain.count(b'"') > 2 * MAX_TEXTS:
        raise RequestError("body", f"must hold at most {MAX_TEXTS} texts and names")
    outside = b'"'.join(plain.split(b'"')[::2])
    if _num_structural(outside) - outside.count(b",") > MAX_CONTAINERS:
        raise RequestError("body", f"must hold at most {MAX_CONTAINERS} lists, objects and names")
    if outside.count(b",") >= MAX_VALUES:
        raise RequestError("body", f"must hold at most {MAX_VALUES} values")
    if _has_long_number(outside):
        raise RequestError("body", f"must hold numbers of at most {MAX_DIGITS} digits")


def _num_structural(text: bytes) -> int:
    return sum(map(text.count, (b"{", b"[", b":", b",")))


def _has_long_number(text: bytes) -> bool:
    return b"0" * (MAX_DIGITS + 1) in text.translate(_DIGITS_TO_ZERO)
