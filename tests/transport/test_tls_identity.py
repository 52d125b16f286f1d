"""Mutual TLS from a shared secret."""

from __future__ import annotations

import datetime
import os
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from llm_serving.errors import ConfigError
from llm_serving.transport import tls_identity
from llm_serving.transport.tls_identity import ClusterIdentity, read_secret

SECRET = "0123456789abcdef" * 2


def meet(master: ssl.SSLContext, agent: ssl.SSLContext) -> bytes:
    """Return what the master reads from a WorkAgent that sends "in"."""
    left, right = socket.socketpair()
    with left, right, ThreadPoolExecutor(1) as pool:
        left.settimeout(10.0)
        right.settimeout(10.0)

        def connect() -> None:
            with agent.wrap_socket(right) as secured:
                secured.sendall(b"in")
                secured.recv(1)

        connecting = pool.submit(connect)
        try:
            with master.wrap_socket(left, server_side=True) as secured:
                return secured.recv(2)
        finally:
            left.close()
            connecting.exception()


def test_equal_secrets_connect() -> None:
    assert meet(ClusterIdentity(SECRET).server_context(), ClusterIdentity(SECRET).client_context()) == b"in"


@pytest.mark.parametrize("other", ["0123456789abcdef" * 2 + "0", "x" * 32])
def test_master_rejects_another_secret(other: str) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        meet(ClusterIdentity(SECRET).server_context(), ClusterIdentity(other).client_context())


def test_work_agent_rejects_a_master_with_another_secret() -> None:
    left, right = socket.socketpair()
    with left, right, ThreadPoolExecutor(1) as pool:
        master = ClusterIdentity("y" * 32).server_context()
        answering = pool.submit(lambda: master.wrap_socket(left, server_side=True))
        with pytest.raises(ssl.SSLCertVerificationError):
            ClusterIdentity(SECRET).client_context().wrap_socket(right)
        right.close()
        assert answering.exception() is not None


def test_master_rejects_a_client_without_a_certificate() -> None:
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname = False
    stranger.verify_mode = ssl.CERT_NONE
    with pytest.raises((ssl.SSLError, ConnectionError)):
        meet(ClusterIdentity(SECRET).server_context(), stranger)


def test_a_short_secret_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"must have at least 32 characters.*Given: 31 characters"):
        ClusterIdentity("a" * 31)


def test_read_secret_strips_white_space(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    for written in (f"  {SECRET}\n", f"{SECRET}\r\n", f"\ufeff{SECRET}\r\n", SECRET, f"\n{SECRET}\n\n"):
        path.write_bytes(written.encode())
        assert read_secret(path) == SECRET
    with pytest.raises(ConfigError, match=r"cluster_config\.secret_file: .*absent"):
        read_secret(tmp_path / "absent")


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o666])
def test_a_secret_file_open_to_other_users_is_rejected(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(mode)
    with pytest.raises(
        ConfigError, match=rf"secret: must be closed to other users \(chmod 600\)\. Its mode is 0{mode:o}"
    ):
        read_secret(path)


@pytest.mark.parametrize("content", [f"{SECRET}\n{SECRET}\n", f"secret {SECRET}"])
def test_a_secret_of_several_words_is_rejected(tmp_path: Path, content: str) -> None:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"secret: must hold one word\. Given: 2 words"):
        read_secret(path)


def test_a_secret_is_only_read_from_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)  # no process ever writes to it
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="must be a regular file"):
            read_secret(path)


def test_certificates_are_accepted_at_any_date(monkeypatch: pytest.MonkeyPatch) -> None:
    ended_long_ago = datetime.datetime(2021, 1, 1, tzinfo=datetime.UTC)  # as on a machine whose clock is years ahead
    monkeypatch.setattr(tls_identity, "_VALID_UNTIL", ended_long_ago)
    assert meet(ClusterIdentity(SECRET).server_context(), ClusterIdentity(SECRET).client_context()) == b"in"


def test_tls_below_1_3_is_rejected() -> None:
    older = ClusterIdentity(SECRET).client_context()
    older.minimum_version = older.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match=r"(?i)protocol"):
        meet(ClusterIdentity(SECRET).server_context(), older)
