"""Advice over HTTP: one separate process at a time, which cannot harm the server."""

from __future__ import annotations

import asyncio
import os
import select
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from llm_serving.admission.admission_control import RefusedRequests
from llm_serving.cli.main import main
from llm_serving.config.schema import ServingConfig
from llm_serving.config.sections.scheduler import SchedulerConfig
from llm_serving.errors import CapacityError, RequestError, UnavailableError
from llm_serving.server.admin.advice import COMMAND, Advisor
from support.fakes import FakeEngine
from support.http_serving import TIMEOUT_S, connect, serving
from support.server_client import error_of

ADVICE = (
    '{"requests": 1500, "refused": 20, "seconds": 60.0, "step_error": 0.1, "played": 9, "not_played": 2, '
    '"advised": [], "otherwise": []}'
)


_ADVISE = Advisor.advise


def _comes(descriptor: int) -> bool:
    """Return whether data arrives in time; the descriptor may be one that `select` does not support."""
    watch = select.poll()
    watch.register(descriptor, select.POLLIN)
    return bool(watch.poll(1000 * TIMEOUT_S))


def advisor(program: str, folder: Path | None = Path("records")) -> Advisor:
    config = replace(ServingConfig(), scheduler=SchedulerConfig(record_path=folder))
    came = [RefusedRequests(time, (4, 5), 10, "a") for time in (100.0, 900.0)]

    def refused(since: float) -> list[RefusedRequests]:
        return [each for each in came if each.time >= since]

    return Advisor(
        lambda: config, lambda: 1000.0, (sys.executable, "-S", "-c", f"import sys, json\n{program}"), refused
    )


def advice_of(program: str, minutes: int = 5) -> Any:
    return asyncio.run(advisor(program).advise(minutes))


def test_advisor_passes_the_current_configuration() -> None:
    program = (
        "question = json.load(sys.stdin)\n"
        "print(json.dumps({**question, 'yaml': question['yaml'].splitlines()[0], 'sources': {}}))"
    )
    assert advice_of(program, 3) == {
        "yaml": "model_config:",
        "sources": {},
        "folder": "records",
        "since": 820.0,
        "budget_s": 120.0,
        "refused": [[900.0, [4, 5], 10, "a"]],
    }


def test_advisor_reports_errors_of_the_simulator() -> None:
    with pytest.raises(RequestError) as caught:
        advice_of("""print('{"error": "must be 20. Given: 4"}'); sys.exit(1)""")
    rule = "`minutes` must cover enough recorded requests; there is no advice on 5"
    assert str(caught.value) == f"{rule}: must be 20. Given: 4"  # the message has the given value once
    with pytest.raises(UnavailableError, match="the simulation exceeded its time or memory limit"):
        advice_of("sys.exit(137)")


def test_advisor_without_recording_names_the_key() -> None:
    with pytest.raises(RequestError, match=r"`record_path` must name a folder.*scheduler_config.record_path"):
        asyncio.run(advisor("", None).advise(5))


def test_advisor_runs_an_existing_module() -> None:
    assert find_spec(COMMAND[-1]) is not None


def test_advisor_reports_a_missing_simulator_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_serving.server.admin.advice.find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match="needs the package llm_serving_simulator, which is not installed"):
        advice_of("print('{}')")


def test_advisor_runs_one_process_for_several_clients() -> None:
    async def run() -> None:
        asked = advisor("sys.stdin.read(); print('{}')")
        one, other = asyncio.create_task(asked.advise(5)), asyncio.create_task(asked.advise(5))
        await asyncio.sleep(0)
        with pytest.raises(CapacityError, match="advice on a different period is being computed"):
            await asked.advise(6)
        assert await one is not None and asked._task is not None
        assert await other == await one
        waits = advisor("import time; time.sleep(600)")
        left = asyncio.create_task(waits.advise(5))
        await asyncio.sleep(0)
        left.cancel()
        await waits.close()
        assert waits._task is not None and waits._task.done()

    asyncio.run(run())


def test_advisor_continues_while_a_client_waits() -> None:
    async def run() -> None:
        asked = advisor("sys.stdin.read(); print('{}')")
        leaves, stays = (asyncio.create_task(asked.advise(5)) for _ in range(2))
        await asyncio.sleep(0)
        leaves.cancel()
        assert await stays == {}

    asyncio.run(run())


def test_advisor_accepts_another_period_after_the_last_client() -> None:
    async def run() -> None:
        program = "question = json.load(sys.stdin)\nwhile question['since'] == 700: sys.stdin.read()\nprint('{}')"
        asked = advisor(program)
        left = asyncio.create_task(asked.advise(5))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait([left])
        assert await asked.advise(6) == {}

    asyncio.run(run())


def test_advisor_kills_the_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "ids"
    os.mkfifo(pipe)
    output_fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    program = (
        "import os, time\n"
        "child = os.fork()\n"
        "if child:\n"
        f"    open({str(pipe)!r}, 'w').write(f'{{os.getpid()}} {{child}}')\n"
        "time.sleep(600)"
    )
    asked = advisor(program)
    monkeypatch.setattr(Advisor, "advise", lambda self, minutes: _ADVISE(asked, minutes))
    with serving(FakeEngine()) as url:
        client = connect(url)
        client.sendall(b"GET /v1/scheduler/advice HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert _comes(output_fd), "it did not begin"
        watched = [os.pidfd_open(int(each)) for each in os.read(output_fd, 100).split()]
        os.close(output_fd)
        assert len(watched) == 2
        client.close()
        for each in watched:
            assert _comes(each), "it outlives its client"
            os.close(each)


def test_advice_over_http_and_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    with serving(engine) as url:
        refused = httpx.get(f"{url}/v1/scheduler/advice")
        assert refused.status_code == 400 and "`record_path` must name a folder" in error_of(refused)["message"]
        for given in ("0", "61", "x", "-1"):
            refused = httpx.get(f"{url}/v1/scheduler/advice?minutes={given}")
            assert error_of(refused)["message"] == f"`minutes` must be an integer from 1 to 60. Given: '{given}'"
        asked = advisor(f"sys.stdin.read(); print('''{ADVICE}''')")
        monkeypatch.setattr(Advisor, "advise", lambda self, minutes: type(asked).__dict__["_simulate"](asked, "f", 1))
        assert main(["advice", "--url", url, "--minutes", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1,500 requests (20 of them refused) of 60 s, 9 other values of the")
    assert lines[1] == "no neighbouring value would have been better"


def test_closing_after_a_simulator_that_could_not_start_raises_nothing() -> None:
    async def run() -> None:
        advising = advisor("")
        advising.command = ("/nonexistent",)
        with pytest.raises(FileNotFoundError):
            await advising.advise(5)
        await advising.close()

    asyncio.run(run())
