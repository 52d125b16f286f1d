import argparse
import json
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import httpx
import pytest
from acceptance.device import answers, environment, load, precision, run
from acceptance.device import server as device_server
from acceptance.device.outcome import Outcome, PartError, report
from acceptance.device.server import Server, ask, serving

EXACT = "exact: the same request gets the same bytes, whatever runs beside it"


def fails(*lines):
    """Return a program that prints a text and fails."""
    return [sys.executable, "-c", f"import sys; sys.exit({json.dumps(chr(10).join(lines))})"]


def program(folder, script, name="npu-smi"):
    """Return the path of a shell script."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


class TestEnvironment:
    def test_environment_without_devices_fails_on_ascend_only(self, tmp_path, monkeypatch):
        monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
        assert environment.examine("cpu", tmp_path, "no-such-program").verdict == "passed"
        found = environment.examine("ascend", tmp_path, "no-such-program")
        assert found.faults == [
            f"no driver of an NPU: {tmp_path}/driver/version.info is not there; install the driver",
            f"no CANN: {tmp_path}/ascend-toolkit/latest has no version; install the toolkit and source its set_env.sh",
            "no device: no-such-program info lists none; this user may lack access to /dev/davinci*",
        ]

    def test_a_device_that_hangs(self, tmp_path, monkeypatch):
        monkeypatch.setattr(environment, "LIST_S", 0.1)
        found = environment.examine("ascend", tmp_path, program(tmp_path, "exec sleep 600"))
        assert found.faults[-1].startswith("no device: ")
        assert "npu-smi info does not end within 0 s; this user" in found.faults[-1]

    def test_environment_of_a_machine_with_a_device(self, tmp_path, monkeypatch):
        (tmp_path / "driver").mkdir()
        (tmp_path / "driver" / "version.info").write_text("Version=24.1.rc3\n")
        (tmp_path / "toolkit").mkdir()
        (tmp_path / "toolkit" / "version.cfg").write_text("toolkit_installed_version=8.0.RC3\n")
        monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path / "toolkit"))
        found = environment.examine("ascend", tmp_path, program(tmp_path, "echo 910B"))
        assert found.faults == []
        assert {"| driver | 24.1.rc3 |", "| CANN | 8.0.RC3 |", "910B"} <= set(found.lines)


class TestPrecision:
    def test_precision_above_the_limit_fails(self):
        results = [
            {"name": "qwen3", "error": 0.0049, "equal": 48, "of": 48},
            {"name": "llama2", "error": 0.0123, "equal": 9, "of": 48},
            {"name": "glm4", "error": float("nan"), "equal": 0, "of": 48},
            {"name": "gemma2", "refused": "no windows"},
        ]
        found = precision.judge(results)
        assert found.faults == [
            "llama2: an error of 1.23% of the largest logit; 0.5% are allowed",
            "glm4: an error of nan% of the largest logit; 0.5% are allowed",
        ]
        assert {"| qwen3 | 0.49% | 48 of 48 |", "| gemma2 | no windows |  |"} <= set(found.lines)

    def test_precision_names_the_model_that_crashed_the_process(self):
        trace = "", "- C++ Call Stack: (For framework developers)", "mindspore/core/utils/ms_context.cc:291 Set"
        found = precision.examine("ascend", [], fails("loading", "RuntimeError: no kernel", *trace))
        assert found.faults == ["ended with 1: RuntimeError: no kernel", "no model was computed"]

    def test_a_device_that_hangs(self, monkeypatch):
        monkeypatch.setattr(precision, "TIMEOUT_S", 0.1)
        found = precision.examine("ascend", [], ["sleep", "600"])
        assert found.faults == ("the models took longer than 0 s",)


class FakeServer:
    url = "http://127.0.0.1:9"
    killed = 0

    def __init__(self, promise=EXACT, restarts=1):
        self.promise, self._restarts = promise, restarts

    def killer(self):
        def kill():
            self.killed += 1

        return kill

    def restarts(self):
        return self._restarts * self.killed


def answering(different=()):
    """Return a function like `ask` whose answers differ for some requests under load."""

    def ask(url, bodies, when_begun=None):
        if when_begun:
            when_begun()
        wrong = different if len(bodies) > 1 else ()
        return ["wrong" if index in wrong else body["prompt"] for index, body in enumerate(bodies)]

    return ask


def breaking(url, bodies, when_begun=None):
    raise PartError("a request is refused with 500: no kernel")


class TestAnswers:
    def test_equal_answers_pass(self):
        server = FakeServer()
        reference = []
        found = answers.same_bytes(server, 5, reference, answering())
        assert found.lines == [f"5 of 5 answers are the same. The server promises: {EXACT}"]
        assert answers.killed(server, reference, answering()).verdict == "passed"

    def test_different_answer_under_load_fails_if_equality_is_guaranteed(self):
        found = answers.same_bytes(FakeServer(), 3, [], answering({1}))
        assert found.faults == [
            "request 1 answers otherwise: " + "Add 17 and 25. " * 1 + "Add 17 and 25. alone, wrong then"
        ]
        found = answers.same_bytes(FakeServer("fast: the last bits depend"), 3, [], answering({1}))
        assert found.verdict == "passed"
        assert found.lines[0].startswith("2 of 3 answers are the same")
        assert found.lines[-1].startswith("- request 1 answers otherwise")

    def test_refused_request_ends_a_part(self):
        with pytest.raises(PartError, match="a request is refused with 500: no kernel"):
            answers.same_bytes(FakeServer(), 3, [], breaking)
        with pytest.raises(PartError, match="a request is refused with 500: no kernel"):
            answers.killed(FakeServer(), ["a"], breaking)
        with pytest.raises(PartError, match="there are no answers to compare with: the part before failed"):
            answers.killed(FakeServer(), [], answering())

    def test_other_bytes_after_a_kill_or_a_missing_restart_fail(self):
        reference = answering()("", answers.bodies(3))
        found = answers.killed(FakeServer(restarts=0), reference, answering({2}))
        assert found.faults[0] == "no WorkAgent was started again: it was not killed, or too late"
        assert found.faults[1].startswith("request 2 answers otherwise")

    def test_ask_reports_an_unreachable_server(self):
        with pytest.raises(PartError, match="the server is gone: ConnectError"):
            ask(FakeServer.url, answers.bodies(1))

    @pytest.mark.parametrize(
        ("status", "text", "message"),
        [
            (500, "no kernel", "a request is refused with 500: no kernel"),
            (200, 'data: {"error": "the WorkAgent has exited"}\n\n', "an answer breaks off: the WorkAgent has exited"),
        ],
    )
    def test_ask_reports_refused_and_incomplete_answers(self, monkeypatch, status, text, message):
        answer = httpx.MockTransport(lambda request: httpx.Response(status, text=text))
        monkeypatch.setattr(device_server.httpx, "AsyncClient", partial(httpx.AsyncClient, transport=answer))
        with pytest.raises(PartError, match=message):
            ask(FakeServer.url, answers.bodies(1))

    def test_guarantee_is_read_from_the_log_of_the_work_agent(self, tmp_path):
        log = tmp_path / "server.log"
        log.write_text("INFO started\n")
        assert Server(9, tmp_path).promise == "nothing is said"
        notice = "--set: device_config.exactness: fast applies to steps of whole prompts only"
        log.write_text(f"WARNING {notice}\nINFO device_config.exactness: fast: the same request\nINFO ready\n")
        assert Server(9, tmp_path).promise == "fast: the same request"

    def test_killer_reports_a_missing_work_agent(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Server, "work_agents", lambda server: [])
        with pytest.raises(PartError, match="no WorkAgent is running"):
            Server(9, tmp_path).killer()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "[ $1 = stop ] && exit 0; echo 'error: no kernel' >&2; exit 2",
            "does not start, exit code 2: error: no kernel",
        ),
        ("exec sleep 600", "does not answer within 0 s"),
    ],
)
def test_server_that_does_not_start_is_reported(tmp_path, monkeypatch, script, message):
    if "sleep" in script:
        monkeypatch.setattr(device_server, "START_S", 0.1)
        monkeypatch.setattr(device_server, "STOP_S", 0.1)
    with (
        pytest.raises(PartError, match=f"the server {message}"),
        serving([], program(tmp_path, script, "llm-serving")),
    ):
        pytest.fail("it goes on")


class TestLoad:
    def examine(self, folder, body):
        script = folder / "load.py"
        script.write_text(body)
        return load.examine(1, 10.0, 150.0, folder, script)

    def test_load_report_compares_with_the_contest(self, tmp_path):
        log = "import pathlib; p = pathlib.Path('testLog'); p.mkdir(exist_ok=True)\n"
        found = self.examine(tmp_path, log + "(p / 'a.log').write_text('All Tasks Done; Exec Time is 401.25')")
        assert found.verdict == "passed"
        assert "| this server, 1500 requests at 10 a second | 401.2 |" in found.lines
        assert "| packed prompts, delayed insertion: the best found | 437 |" in found.lines

    def test_load_reports_a_failed_or_hanging_load_test(self, tmp_path, monkeypatch):
        assert self.examine(tmp_path, "raise SystemExit('3 failed')").faults == ("the load test ends with 1: 3 failed",)
        monkeypatch.setattr(load, "LIMIT_S", 0.1)
        hangs = self.examine(tmp_path, "import signal; signal.pause()")
        assert hangs.faults == ("the load test took longer than 0 s",)

    def test_load_reports_a_load_test_without_output(self, tmp_path):
        assert self.examine(tmp_path, "").faults == (f"the log in {tmp_path}/testLog has no line `All Tasks Done`",)


def arguments_of(**changes):
    given = {"device": "cpu", "model": "demo", "dtype": "float16", "exactness": "exact", "families": [], "set": []}
    return argparse.Namespace(**(given | changes))


def test_parts_run_in_order_without_a_server(monkeypatch):
    monkeypatch.setattr(precision, "examine", lambda device, names: Outcome(precision.TITLE))

    @contextmanager
    def missing(options):
        assert "device_config.kernels=primitives" in options
        raise PartError("the server does not start, exit code 2: no kernel")
        yield

    monkeypatch.setattr(run, "serving", missing)
    found = list(run.parts(arguments_of()))
    assert [each.title for each in found] == ["Environment", "Precision", "Server"]
    assert found[-1].faults == ("the server does not start, exit code 2: no kernel",)


def test_failing_part_does_not_stop_the_next_one(monkeypatch, tmp_path):
    def breaks(*given):
        raise OSError("npu-smi cannot be run")

    @contextmanager
    def started(options):
        yield argparse.Namespace(port=9)

    monkeypatch.setattr(environment, "examine", breaks)
    monkeypatch.setattr(precision, "examine", lambda device, names: Outcome(precision.TITLE))
    monkeypatch.setattr(run, "serving", started)
    monkeypatch.setattr(answers, "same_bytes", breaking)
    monkeypatch.setattr(load, "examine", lambda *given: Outcome(load.TITLE))
    path = tmp_path / "report.md"
    assert run.main(["--device", "cpu", "--report", str(path)]) == 1
    text = path.read_text()
    assert "- **OSError: npu-smi cannot be run**" in text
    assert "- **a request is refused with 500: no kernel**" in text
    assert "- **there are no answers to compare with: the part before failed**" in text
    assert "| Load | passed |" in text


def test_report_has_every_verdict_and_fault(tmp_path, monkeypatch):
    outcomes = [Outcome("Environment", ["all there"]), Outcome.failed("Load", "it ends with 1")]
    monkeypatch.setattr(run, "parts", lambda arguments: iter(outcomes))
    assert run.main(["--device", "cpu", "--report", str(tmp_path / "report.md")]) == 1
    text = (tmp_path / "report.md").read_text()
    assert text == report("Acceptance of cpu, model demo, float16", outcomes)
    for line in ("| Environment | passed |", "| Load | FAILED |", "all there", "- **it ends with 1**"):
        assert line in text.splitlines()


def test_device_acceptance_command_has_a_help():
    script = run.__file__.split("/tests/")[0] + "/scripts/ascend_acceptance.sh"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
