"""The TLS context of the server, from the files of its certificate."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

from llm_serving.core.files import read_regular
from llm_serving.errors import ConfigError, ModelError

CERTFILE: Final = "serving_config.ssl_certfile"
KEYFILE: Final = "serving_config.ssl_keyfile"
PASSWORD_FILE: Final = "serving_config.ssl_keyfile_password_file"  # noqa: S105
MAX_FILE_BYTES: Final = 2**20
MAX_PASSWORD_BYTES: Final = 1023


def tls_context(certfile: Path, keyfile: Path | None, password_file: Path | None = None) -> ssl.SSLContext:
    """Return the context of a server for TLS 1.2 or newer. Raise ConfigError, which names the key of a bad file."""
    _read(CERTFILE, certfile)
    key_name, key_path = (KEYFILE, keyfile) if keyfile is not None else (CERTFILE, certfile)
    is_encrypted = b"ENCRYPTED" in _read(key_name, key_path)
    if is_encrypted and password_file is None:
        raise ConfigError(
            f"{key_name}: {key_path}: the private key is encrypted, its password must be in {PASSWORD_FILE}"
        )
    password = b"" if password_file is None else _read_password(password_file)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(certfile)
    except (ssl.SSLError, OSError):
        raise ConfigError(f"{CERTFILE}: {certfile}: must hold a certificate in PEM form") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Never None: without a password, OpenSSL would prompt for one on the terminal.
        context.load_cert_chain(certfile, keyfile, password=lambda: password)
    except (ssl.SSLError, OSError) as error:
        if is_encrypted:
            raise ConfigError(f"{PASSWORD_FILE}: {password_file}: must hold the password of {key_path}") from None
        mismatch = getattr(error, "reason", None) == "KEY_VALUES_MISMATCH"
        rule = f"is not the key of the certificate {certfile}" if mismatch else "must hold a private key in PEM form"
        raise ConfigError(f"{key_name}: {key_path}: {rule}") from None
    return context


def _read(name: str, path: Path) -> bytes:
    try:
        return read_regular(path, MAX_FILE_BYTES)
    except ModelError as error:
        raise ConfigError(f"{name}: {error}") from None


def _read_password(path: Path) -> bytes:
    password = _read(PASSWORD_FILE, path).partition(b"\n")[0].removesuffix(b"\r")
    if not 0 < len(password) <= MAX_PASSWORD_BYTES:
        rule = f"the first line must be a password of at most {MAX_PASSWORD_BYTES} bytes"
        raise ConfigError(f"{PASSWORD_FILE}: {path}: {rule}")
    return password
