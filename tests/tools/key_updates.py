"""Records of TLS 1.3 that do nothing but change the key of their sender (RFC 8446, 4.6.3 and 7.2)."""

from __future__ import annotations

import hashlib
import hmac
import ssl
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

HASHES = {"TLS_AES_256_GCM_SHA384": ("sha384", 32), "TLS_AES_128_GCM_SHA256": ("sha256", 16)}
"""Name of a cipher -> of its hash, and the bytes of its key."""
KEY_UPDATE = b"\x18\x00\x00\x01"
"""A handshake message of one byte: whether the receiver is to change its key as well."""
HANDSHAKE = b"\x16"


class SpiedContext:
    """A context for one client after the other, whose secrets are told."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115  as long as this
        context.keylog_filename = self._file.name
        self.context = context

    def key_updates(self, session: ssl.SSLObject, num_sent: int, *, asks: bool) -> Iterator[bytes]:
        """What the client whose handshake was the last one may send next, a record after the other.

        Args:
            session: The client's.
            num_sent: Records it has sent since its handshake.
            asks: Whether the other side is to change its key each time.
        """
        cipher = session.cipher()
        assert cipher is not None
        lines = Path(self._file.name).read_text().splitlines()
        secret = bytes.fromhex([line for line in lines if line.startswith("CLIENT_TRAFFIC_SECRET_0 ")][-1].split()[2])
        return _key_updates(secret, *HASHES[cipher[0]], num_sent, KEY_UPDATE + bytes([asks]) + HANDSHAKE)


def _key_updates(secret: bytes, name: str, key_size: int, num_sent: int, message: bytes) -> Iterator[bytes]:
    header = b"\x17\x03\x03" + (len(message) + 16).to_bytes(2)
    while True:
        key, start = _expanded(secret, b"key", key_size, name), _expanded(secret, b"iv", 12, name)
        nonce = (int.from_bytes(start) ^ num_sent).to_bytes(12)
        yield header + AESGCM(key).encrypt(nonce, message, header)
        secret, num_sent = _expanded(secret, b"traffic upd", len(secret), name), 0


def _expanded(secret: bytes, label: bytes, size: int, name: str) -> bytes:
    """HKDF-Expand-Label, of one block of the hash at most."""
    assert size <= hashlib.new(name).digest_size
    label = b"tls13 " + label
    info = size.to_bytes(2) + bytes([len(label)]) + label + b"\x00"
    return hmac.digest(secret, info + b"\x01", name)[:size]
