"""Random changes of valid inputs, for fuzzing without coverage."""

from __future__ import annotations

import random
from collections.abc import Sequence

PIECES = (
    *(b"\x00", b"\xff", b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff\xff\xff\xff\xff", b"\xc0\x80", b"\xed\xa0\x80"),
    *(b"{", b"}", b"[", b"]", b'"', b":", b",", b"&a ", b"*a", b"<<: ", b"!!python/name:os.system ", b"- ", b"? "),
    *(b"-1", b"0", b"1e400", b"9223372036854775808", b"NaN", b"null", b"true", b"\n", b"    ", b"#", b"\\ud800"),
)


def mutated(rng: random.Random, corpus: Sequence[bytes], max_bytes: int = 20_000) -> bytes:
    """Return an input of the corpus after a few changes: bytes replaced, pieces inserted, removed or copied."""
    data = bytearray(rng.choice(corpus))
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randint(0, len(data))
        size = min(rng.choice((1, 2, 8, 64)), len(data) - at)
        change = rng.randrange(6)
        if change == 0 and at < len(data):
            data[at] = rng.randrange(256)
        elif change == 1:
            data[at:at] = rng.choice(PIECES)
        elif change == 2:
            del data[at : at + size]
        elif change == 3:
            data[at:at] = data[at : at + size] * rng.choice((1, 2, 50))
        elif change == 4:
            other = rng.choice(corpus)
            start = rng.randint(0, len(other))
            data[at:at] = other[start : start + rng.choice((4, 16, 256))]
        else:
            data[at : at + size] = rng.choice(PIECES)
    return bytes(data[:max_bytes])
