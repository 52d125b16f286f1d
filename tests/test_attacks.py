"""Reduced attacks reach the server, and the server still serves."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

import psutil
import pytest
import trustme
from support.fakes import FakeEngine
from support.http_serving import connect, get, read_until, serving
from support.plain_server import plain_server
from support.server_process import undisturbed, unwind_on_sigterm
from tools.attackers import ATTACKS, run, smaller
from tools.attacks import Row, Watch


@pytest.fixture(scope="module")
def url():
    with serving(FakeEngine()) as url:
        yield url


@pytest.fixture(scope="module")
def secure_url(tmp_path_factory):
    file = tmp_path_factory.mktemp("tls") / "certificate.pem"
    trustme.CA().issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(file)
    with serving(FakeEngine(limits={"ssl_certfile": file})) as url:
        yield url


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("endless headers", {"ended with 431"}),
        ("endless URL", {"ended with 414"}),
        ("one endless trailer", {"ended with 431"}),
        ("no HTTP", {"ended with 400"}),
        ("a body without end", {"ended with 405"}),
        ("requests without end, answers unread", {"left open after 200"}),
        ("2,000 silent connections", {"left open"}),
        ("connections without end", {"left open"}),
        ("1,000 slow headers", {"left open"}),
    ],
)
def test_attack_connections_end_as_expected(url, name, ends):
    attack = smaller(ATTACKS[name])
    if not any(end.startswith("left open") for end in ends):
        attack = replace(attack, seconds=30.0)  # the attack ends when the server has closed all connections
    outcome = run(attack, int(url.rsplit(":", 1)[1]))
    assert set(outcome.ends) == ends
    with connect(url) as client:
        client.sendall(get())
        assert read_until(client, b"\r\n") == b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("TLS: 1,000 handshakes not gone on with", {"left open"}),
        ("TLS: handshakes without end", {"left open", "ended"}),  # above the limit, new connections replace others
        ("TLS: records of a byte", {"left open"}),
        ("TLS: keys changed without end", {"ended"}),
        ("TLS: no handshake", {"ended"}),
    ],
)
def test_tls_attack_connections_end_as_expected(secure_url, name, ends):
    attack = smaller(ATTACKS[name])
    if ends == {"ended"}:
        attack = replace(attack, seconds=30.0)
    outcome = run(attack, int(secure_url.rsplit(":", 1)[1]))
    assert outcome.ends
    assert outcome.ends.keys() <= ends


@pytest.mark.parametrize(
    ("growth", "health_s", "num_not_ok", "is_good"),
    [(150_000_000, 0.25, 0, True), (150_000_001, 0.1, 0, False), (0, 0.26, 0, False), (0, 0.25, 1, False)],
)
def test_attack_row_is_good_within_its_limits(growth, health_s, num_not_ok, is_good):
    assert Row("x", 0, {}, growth, health_s, 0.0, 0.0, 10, num_not_ok).is_good == is_good


def test_watch_samples_the_server_and_a_plain_server(url):
    with (
        plain_server() as floor_port,
        Watch(int(url.rsplit(":", 1)[1]), psutil.Process(), floor_port=floor_port) as watch,
    ):
        while len(watch.floor) < 2 or len(watch.health) < 2:
            time.sleep(0.01)
    assert watch.num_not_ok == 0
    assert all(0 <= part <= whole for part, whole in zip(watch.without_wait, watch.health, strict=True))


def test_sigterm_unwinds_a_command_that_started_servers():
    before = signal.getsignal(signal.SIGTERM)
    try:
        unwind_on_sigterm()
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
        assert ended.value.code == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_waits_until_a_server_has_stopped():
    before = signal.getsignal(signal.SIGTERM)
    done = []
    try:
        unwind_on_sigterm()
        with pytest.raises(SystemExit), undisturbed():
            signal.raise_signal(signal.SIGTERM)
            done.append("stopped")
        assert done == ["stopped"]
    finally:
        signal.signal(signal.SIGTERM, before)
