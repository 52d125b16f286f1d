"""Mutual TLS between master and WorkAgents of a cluster, derived from one secret that all machines share.

Both sides present the same certificate, and trust no other. Every machine derives it from the secret, bit for bit: any
32 bytes are an Ed25519 key, and Ed25519 signatures are deterministic (RFC 8032).
"""

from __future__ import annotations

import datetime
import os
import ssl
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llm_serving.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MIN_SECRET_CHARS: Final = 32
"""Minimum length of the secret. Any peer sees the certificate, and could find a shorter secret by trial."""
_NO_CHECK_TIME: Final = ssl.VerifyFlags(0x200000)
"""OpenSSL's flag `X509_V_FLAG_NO_CHECK_TIME`, for which Python has no name."""
_PURPOSE: Final = b"llm-serving cluster identity 1"
_NAME: Final = "llm-serving cluster"
_VALID_FROM: Final = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_VALID_UNTIL: Final = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)


class ClusterIdentity:
    """Key and certificate derived from a cluster's secret. Raise ConfigError for a short secret or missing package."""

    def __init__(self, secret: str) -> None:
        if len(secret) < MIN_SECRET_CHARS:
            raise ConfigError(
                f"the cluster secret must have at least {MIN_SECRET_CHARS} characters, such as those of "
                f"`openssl rand -hex 32`. Given: {len(secret)} characters"
            )
        try:
            from cryptography.hazmat.primitives import hashes, serialization
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ImportError:
            raise ConfigError(
                "a cluster needs the packages ray and cryptography: pip install -e 'llm-serving[ray]'"
            ) from None
        seed = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=_PURPOSE).derive(secret.encode())
        key = Ed25519PrivateKey.from_private_bytes(seed)
        self._certificate = _certificate(key)
        self._key = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def server_context(self) -> ssl.SSLContext:
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        # No session tickets: clients never resume, and an idle connection must become readable only when it ends.
        context.num_tickets = 0
        return context

    def client_context(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate does not depend on the machine
        context.verify_flags |= _NO_CHECK_TIME  # machines may have a wrong clock
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self._certificate.decode())
        fd = os.memfd_create("llm_serving_identity", os.MFD_CLOEXEC)  # load_cert_chain only reads files
        try:
            os.write(fd, self._certificate + self._key)
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return context


def _certificate(key: Ed25519PrivateKey) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.x509.oid import NameOID

    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
    builder = x509.CertificateBuilder(
        issuer_name=name,
        subject_name=name,
        public_key=key.public_key(),
        serial_number=1,
        not_valid_before=_VALID_FROM,
        not_valid_after=_VALID_UNTIL,
        extensions=[x509.Extension(x509.BasicConstraints.oid, True, x509.BasicConstraints(ca=True, path_length=0))],
    )
    return builder.sign(key, None).public_bytes(serialization.Encoding.PEM)


def read_secret(path: Path) -> str:
    """Return the secret in a file. Raise ConfigError if it is not one word, or if other users can access the file."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise _unusable(path, "must be a regular file")
        if mode & stat.S_IRWXO:
            raise _unusable(path, f"must be closed to other users (chmod 600). Its mode is {mode & 0o777:04o}")
        secret = path.read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, str(error)) from None
    if len(secret.split()) > 1:
        raise _unusable(path, f"must hold one word. Given: {len(secret.split())} words")
    return secret


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError(f"cluster_config.secret_file: {path}: {why}")
