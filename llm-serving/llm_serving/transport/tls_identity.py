"""TLS between master and WorkAgents of one cluster, from one secret that all its machines have.

Both sides show the same certificate, which is made from the secret alone, and trust no other: whoever has the secret is
inside, and nobody else is. An Ed25519 key is any 32 bytes and its signatures have no random part (RFC 8032), so that
each machine makes the certificate for itself, equal to the last bit.
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
"""An attacker who connects is shown the certificate and may try secrets as fast as he can compute."""
_NO_CHECK_TIME: Final = ssl.VerifyFlags(0x200000)
"""`X509_V_FLAG_NO_CHECK_TIME` of OpenSSL, which Python has no name for."""
_PURPOSE: Final = b"llm-serving cluster identity 1"
_NAME: Final = "llm-serving cluster"
_BEGINS: Final = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_ENDS: Final = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)


class ClusterIdentity:
    """The certificate of a cluster.

    Args:
        secret: At least `MIN_SECRET_CHARS` random characters.

    Raises:
        ConfigError: It is shorter, or the package that makes certificates is not installed.
    """

    def __init__(self, secret: str) -> None:
        if len(secret) < MIN_SECRET_CHARS:
            raise ConfigError(
                f"the cluster secret must have at least {MIN_SECRET_CHARS} characters, such as those of "
                f"`openssl rand -hex 32`. Given: {len(secret)}"
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

    def of_master(self) -> ssl.SSLContext:
        """For who listens."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # nobody comes back by one, and an idle connection shall be readable at its end alone
        return context

    def of_work_agent(self) -> ssl.SSLContext:
        """For who connects."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate says who, not where
        context.verify_flags |= _NO_CHECK_TIME  # nor since when: whoever has the secret may have a wrong clock
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self._certificate.decode())
        fd = os.memfd_create("llm_serving_identity", os.MFD_CLOEXEC)  # the library reads files only
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
        not_valid_before=_BEGINS,
        not_valid_after=_ENDS,
        extensions=[x509.Extension(x509.BasicConstraints.oid, True, x509.BasicConstraints(ca=True, path_length=0))],
    )
    return builder.sign(key, None).public_bytes(serialization.Encoding.PEM)


def read_secret(path: Path) -> str:
    """The secret in a file, without white space around it: however an editor ended its line, it is the same one.

    Raises:
        ConfigError: It cannot be read, every user can read or write it, or it is more than one word.
    """
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
        raise _unusable(path, f"must hold one word. Given: {len(secret.split())}")
    return secret


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError(f"cluster_config.secret_file: {path}: {why}")
