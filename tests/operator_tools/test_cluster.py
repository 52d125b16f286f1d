"""`llm-serving cluster` with a running server."""

from __future__ import annotations

import pytest
from llm_serving.cli.main import main
from support.fakes import FakeEngine
from support.http_serving import serving


def test_cluster_command_shows_and_joins_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    engine.num_running, engine.num_waiting = 2, 1
    with serving(engine) as url:
        for order in (["replicas"], ["join", "0"]):
            assert main(["cluster", *order, "--url", url]) == 0
            assert capsys.readouterr().out == "   0  serving     3 unfinished\n"


@pytest.mark.parametrize(
    ("number", "message"),
    [("0", "must not be the only replica that serves. Given: 0"), ("-1", "must be the number of a replica")],
)
def test_cluster_shows_the_servers_error(capsys: pytest.CaptureFixture[str], number: str, message: str) -> None:
    with serving(FakeEngine()) as url:
        assert main(["cluster", "drain", "--url", url, "--", number]) == 1
    assert f"400: `replica` {message}" in capsys.readouterr().err


def test_cluster_command_without_a_server_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "replicas", "--url", "http://127.0.0.1:1"]) == 1
    assert "no server answers at http://127.0.0.1:1" in capsys.readouterr().err
