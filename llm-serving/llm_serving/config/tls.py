"""The certificate of the server."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

from llm_serving.core.files import read_regular
from llm_serving.errors import ConfigError, ModelError

CERTFILE: Final = "serving_config.ssl_certfile"
KEYFILE: Final = "serving_config.ssl_keyfile"
MAX_FILE_BYTES: Final = 2**20


def tls_context(certfile: Path, keyfile: Path | None) -> ssl.SSLContext:
    """A context of a server that shows this certificate; TLS 1.2 or newer.

    Args:
        certfile: PEM: the certificate, then those that lead to its authority.
        keyfile: PEM: its private key, not encrypted. None: it is in `certfile` too.

    Raises:
        ConfigError: Names the key of the file that cannot be used.
    """
    _read(CERTFILE, certfile)
    key_name, key_path = (KEYFILE, keyfile) if keyfile is not None else (CERTFILE, certfile)
    if b"ENCRYPTED" in _read(key_name, key_path):
        raise ConfigError(f"{key_name}: {key_path}: the private key must not be encrypted")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(certfile)
    except (ssl.SSLError, OSError):
        raise ConfigError(f"{CERTFILE}: {certfile}: must hold a certificate in PEM form") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certfile, keyfile, password=_no_password)
    except (ssl.SSLError, OSError) as error:
        mismatch = getattr(error, "reason", None) == "KEY_VALUES_MISMATCH"
        rule = f"is not the key of the certificate {certfile}" if mismatch else "must hold a private key in PEM form"
        raise ConfigError(f"{key_name}: {key_path}: {rule}") from None
    return context


def _read(name: str, path: Path) -> bytes:
    try:
        return read_regular(path, MAX_FILE_BYTES)
    except ModelError as error:
        raise ConfigError(f"{name}: {error}") from None


def _no_password() -> str:
    """Keeps OpenSSL from asking for one on the terminal."""
    return ""
