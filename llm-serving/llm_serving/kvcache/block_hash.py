"""Names of full blocks: equal names, equal keys and values."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 16


def namespace_hash(namespace: str) -> bytes:
    """Where the chain of a namespace starts; blocks of different namespaces never have the same name."""
    return blake2b(namespace.encode(), digest_size=DIGEST_BYTES, person=b"namespace").digest()


def block_hash(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """Name of the block that holds `token_ids` after the block named `previous`.

    A key or value depends on all tokens before it, so the name of a block chains the names of those before it. A
    cryptographic hash, since users choose the tokens: nobody can make two texts share a block.
    """
    return blake2b(previous + array("i", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()
