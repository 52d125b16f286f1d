"""The server's certificate, which may be renewed while it serves."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Final

from llm_serving.config.tls import tls_context
from llm_serving.errors import ConfigError
from llm_serving.log import get_logger

logger = get_logger(__name__)

PERIOD_S: Final = 5.0
"""Seconds between two looks at the files."""

Version = tuple[tuple[int, int, int], ...]


class Certificates:
    """The TLS context for new connections, of files that are read again when they change.

    Files that cannot be used are logged once, and the certificate before them serves on.

    Args:
        certfile: See `tls_context`.
        keyfile: See `tls_context`.
        password_file: See `tls_context`.

    Raises:
        ConfigError: The files cannot be used.
    """

    def __init__(self, certfile: Path, keyfile: Path | None, password_file: Path | None = None) -> None:
        self._certfile = certfile
        self._files = certfile, keyfile, password_file
        self._version = self._look()
        self.context: ssl.SSLContext = tls_context(*self._files)

    def reload_if_changed(self) -> bool:
        """Whether there is a new context."""
        version = self._look()
        if version == self._version:
            return False
        self._version = version
        try:
            self.context = tls_context(*self._files)
        except ConfigError as error:
            logger.error("the certificate before it serves on: %s", error)
            return False
        logger.info("%s: the certificate was read again", self._certfile)
        return True

    async def watch(self, period_s: float = PERIOD_S) -> None:
        """Looks at the files until it is cancelled."""
        while True:
            await asyncio.sleep(period_s)
            self.reload_if_changed()

    def _look(self) -> Version:
        return tuple(_version(file) for file in self._files if file is not None)


def _version(file: Path) -> tuple[int, int, int]:
    """What differs once a file is written or replaced; links are followed."""
    try:
        status = file.stat()
    except OSError:
        return 0, 0, 0
    return status.st_mtime_ns, status.st_ino, status.st_size
