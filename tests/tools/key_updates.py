"""TLS 1.3 key update records (RFC 8446, sections 4.6.3 and 7.2)."""

from __future__ import annotations

import hashlib
import hmac
import ssl
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

HASHES = {"TLS_AES_256_GCM_SHA384": ("sha384", 32), "TLS_AES_128_GCM_SHA256": ("sha256", 16)}
"""(hash, key size in bytes) by the name of a cipher."""
KEY_UPDATE = b"\x18\x00\x00\x01"
"""A handshake message whose one byte says whether the receiver must update its key as well."""
HANDSHAKE = b"\x16"


class KeyLoggingContext:
    """A TLS context that logs the secrets of its clients; it serves one client at a time."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115  open as long as this object
        context.keylog_filename = self._file.name
        self.context = context

    def key_updates(self, session: ssl.SSLObject, num_sent: int, *, asks: bool) -> Iterator[bytes]:
        """Yield key update records that the newest client may send next.

        Args:
            session: Connection of the client.
            num_sent: Records that it has sent since its handshake.
            asks: Whether each record asks the server to update its key.
        """
        cipher = session.cipher()
        assert cipher is not None
        lines = Path(self._file.name).read_text().splitlines()
        secret = bytes.fromhex([line for line in lines if line.startswith("CLIENT_TRAFFIC_SECRET_0 ")][-1].split()[2])
        return _key_updates(secret, *HASHES[cipher[0]], num_sent, KEY_UPDATE + bytes([asks]) + HANDSHAKE)


def _key_updates(secret: bytes, name: str, key_size: int, num_sent: int, message: bytes) -> Iterator[bytes]:
    header = b"\x17\x03\x03" + (len(message) + 16).to_bytes(2)
    while True:
        key, start = _expand_label(secret, b"key", key_size, name), _expand_label(secret, b"iv", 12, name)
        nonce = (int.from_bytes(start) ^ num_sent).to_bytes(12)
        yield header + AESGCM(key).encrypt(nonce, message, header)
        secret, num_sent = _expand_label(secret, b"traffic upd", len(secret), name), 0


def _expand_label(secret: bytes, label: bytes, size: int, name: str) -> bytes:
    """HKDF-Expand-Label, limited to one block of the hash."""
    assert size <= hashlib.new(name).digest_size
    label = b"tls13 " + label
    info = size.to_bytes(2) + bytes([len(label)]) + label + b"\x00"
    return hmac.digest(secret, info + b"\x01", name)[:size]
