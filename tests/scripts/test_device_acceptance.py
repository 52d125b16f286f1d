import argparse
import json
import re
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import httpx
import pytest
from acceptance.device import answers, environment, load, long_context, precision, run, step_time
from acceptance.device import server as device_server
from acceptance.device.outcome import Outcome, PartError, report
from acceptance.device.server import Answer, Server, ask, serving
from support.model_folders import write_config

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
        assert environment.examine("cpu", (), tmp_path, "no-such-program").verdict == "passed"
        found = environment.examine("ascend", (), tmp_path, "no-such-program")
        assert found.faults == [
            f"no driver of an NPU: {tmp_path}/driver/version.info is not there; install the driver",
            f"no CANN: {tmp_path}/ascend-toolkit/latest has no version; install the toolkit and source its set_env.sh",
            "no device: no-such-program info lists none; this user may lack access to /dev/davinci*",
        ]

    def test_environment_reports_a_hanging_device(self, tmp_path, monkeypatch):
        monkeypatch.setattr(environment, "LIST_S", 0.1)
        found = environment.examine("ascend", ("run.py", "--set", "a b"), tmp_path, program(tmp_path, "exec sleep 600"))
        assert found.faults[-1].startswith("no device: ")
        assert "npu-smi info does not end within 0 s; this user" in found.faults[-1]

    def test_environment_of_a_machine_with_a_device_passes(self, tmp_path, monkeypatch):
        (tmp_path / "driver").mkdir()
        (tmp_path / "driver" / "version.info").write_text("Version=24.1.rc3\n")
        (tmp_path / "toolkit").mkdir()
        (tmp_path / "toolkit" / "version.cfg").write_text("toolkit_installed_version=8.5.RC1\n")
        monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path / "toolkit"))
        monkeypatch.setenv("ASCEND_OPP_PATH", str(tmp_path / "opp"))
        monkeypatch.setattr(environment, "COMPILER", "pass")
        found = environment.examine("ascend", ("run.py", "--set", "a b"), tmp_path, program(tmp_path, "echo 910B"))
        assert found.faults == []
        assert {"| driver | 24.1.rc3 |", "| CANN | 8.5.RC1 |", "910B"} <= set(found.lines)
        assert "| command | run.py --set 'a b' |" in found.lines
        assert any(re.fullmatch(r"\| date \| \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC \|", line) for line in found.lines)

    def test_environment_reports_wrong_cann_versions_and_missing_packages(self, tmp_path, monkeypatch):
        monkeypatch.delenv("ASCEND_OPP_PATH", raising=False)
        assert environment.wrong_cann("8.0.RC3", tmp_path / "latest") == [
            "CANN 8.0.RC3 is none of those that MindSpore 2.10 accepts: 8.2, 8.3, 8.5, 9.0, 9.1",
            f"CANN's variables are not set: source {tmp_path}/set_env.sh in this shell",
        ]
        monkeypatch.setenv("ASCEND_OPP_PATH", str(tmp_path))
        monkeypatch.setattr(environment, "COMPILER", "import module_that_is_missing")
        assert environment.wrong_cann("9.1.0", tmp_path / "latest") == [
            "CANN's operator compiler cannot be imported, ModuleNotFoundError: No module named "
            "'module_that_is_missing': install the extra `ascend` of this project"
        ]

    def test_commit_is_named_with_changes_or_unknown(self, tmp_path):
        def git(*arguments):
            identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
            subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

        assert environment.commit(tmp_path / "missing") == "unknown"
        git("init", "-q")
        (tmp_path / "a").write_text("a")
        git("add", "a")
        git("commit", "-qm", "Add a", "--no-verify")
        assert re.fullmatch("[0-9a-f]{40,64}", environment.commit(tmp_path))
        (tmp_path / "a").write_text("b")
        assert re.fullmatch("[0-9a-f]{40,64} with changes", environment.commit(tmp_path))

    def test_warnings_of_all_logs_are_counted_by_kind(self, tmp_path):
        at = "(15903:1403,MainProcess):2026-11-28-16:35:55.859.000 [mindspore/dtype.py:295]"
        (tmp_path / "server").mkdir()
        (tmp_path / "server" / "server.log").write_text(f"INFO x\n[WARNING] ME{at} slot 7 is old\n")
        (tmp_path / "a.log").write_text(f"[WARNING] ME{at} slot 8 is old\n[ERROR] KERNEL(1:2,x):1 no kernel\n")
        found = environment.warnings_of(tmp_path)
        assert found.verdict == "passed"
        assert "| 2 | WARNING ME: [mindspore/dtype.py:295] slot 8 is old |" in found.lines
        assert "| 1 | ERROR KERNEL: no kernel |" in found.lines
        assert f"All logs are in {tmp_path}." in found.lines
        assert environment.warnings_of(tmp_path / "none").lines[0] == "none"


def result(name, prompt, chunk=0.001, decode=0.001, limit=0.005):
    return {"name": name, "context": 1024, "limit": limit, "prompt": prompt, "chunk": chunk, "decode": decode}


class TestPrecision:
    def test_precision_above_the_limit_fails(self):
        results = [
            result("qwen3", 0.0049),
            result("llama2", 0.001, chunk=0.0123),
            result("glm4", 0.001, decode=float("nan")),
            result("phi4", 0.03, limit=0.04),
            {"name": "gemma2", "refused": "no windows"},
        ]
        found = precision.judge(results)
        assert found.faults == [
            "llama2: an error of 1.23% of the largest logit in chunk steps; 0.5% are allowed",
            "glm4: an error of nan% of the largest logit in decode steps; 0.5% are allowed",
        ]
        assert {"| qwen3 | 1024 | 0.49% | 0.10% | 0.10% |", "| gemma2 | no windows |"} <= set(found.lines)

    def test_a_model_that_crashes_or_hangs_does_not_stop_the_next_ones(self, tmp_path, monkeypatch):
        monkeypatch.setattr(precision, "MODEL_S", 0.5)
        code = (
            "import json, os, sys, time; name = sys.argv[1]\n"
            "if name == 'llama3': print('RuntimeError: no kernel'); print('[WARNING] of MindSpore'); sys.exit(1)\n"
            "if name == 'qwen2': os.kill(os.getpid(), 11)\n"
            "if name == 'qwen3': time.sleep(600)\n"
            f"print(json.dumps({result('', 0.001)!r} | {{'name': name}}))"
        )
        names = ["llama3", "qwen2", "qwen3", "llama2"]
        found = precision.examine(names, [], tmp_path, [sys.executable, "-c", code])
        logs = [tmp_path / f"precision-{name}.log" for name in names]
        assert found.faults == [
            f"llama3: ended with exit code 1: RuntimeError: no kernel; {logs[0]} has its output",
            f"qwen2: ended with SIGSEGV: no output; {logs[1]} has its output",
            f"qwen3: took longer than 0 s; {logs[2]} has its output",
        ]
        assert "| llama2 | 1024 | 0.10% | 0.10% | 0.10% |" in found.lines
        assert "RuntimeError: no kernel" in logs[0].read_text()

    def test_precision_passes_step_settings_to_each_model(self, tmp_path):
        code = "import sys; sys.exit(' '.join(sys.argv[1:]))"
        settings = [
            "model_config.model_dtype=bfloat16",
            "serving_config.server_port=1",
            "quant_config.quantization=w8a8",
        ]
        found = precision.examine(["llama2"], settings, tmp_path, [sys.executable, "-c", code])
        assert "llama2 --set model_config.model_dtype=bfloat16 --set quant_config.quantization=w8a8" in found.faults[0]
        assert "server_port" not in found.faults[0]


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


def answer(text, token_ids=(1,), logprobs=(0.0,), arrivals=(0.1,)):
    return Answer(text, tuple(token_ids), tuple(logprobs), tuple(arrivals))


def answering(different=()):
    """Return a function like `ask` whose answers differ for some requests under load."""

    def ask(url, bodies, when_begun=None):
        if when_begun:
            when_begun()
        wrong = different if len(bodies) > 1 else ()
        return [answer("wrong" if index in wrong else body["prompt"]) for index, body in enumerate(bodies)]

    return ask


def breaking(*given, **named):
    raise PartError("a request is refused with 500: no kernel")


class TestAnswers:
    def test_acceptance_of_equal_answers_passes(self):
        server = FakeServer()
        reference = []
        found = answers.same_bytes(server, 5, reference, answering())
        assert found.lines == [f"5 of 5 answers are the same. The server promises: {EXACT}"]
        assert answers.killed(server, reference, answering()).verdict == "passed"

    def test_different_answer_under_load_fails_if_equality_is_guaranteed(self):
        found = answers.same_bytes(FakeServer(), 3, [], answering({1}))
        assert found.faults == ["request 1 answers otherwise: 'Add 17 and 25. Add 17 and 25.' alone, 'wrong' then"]
        found = answers.same_bytes(FakeServer("fast: the last bits depend"), 3, [], answering({1}))
        assert found.verdict == "passed"
        assert found.lines[0].startswith("2 of 3 answers are the same")
        assert found.lines[-1].startswith("- request 1 answers otherwise")

    def test_refused_request_ends_an_acceptance_part(self):
        with pytest.raises(PartError, match="a request is refused with 500: no kernel"):
            answers.same_bytes(FakeServer(), 3, [], breaking)
        with pytest.raises(PartError, match="a request is refused with 500: no kernel"):
            answers.killed(FakeServer(), [answer("a")], breaking)
        with pytest.raises(PartError, match="there are no answers to compare with: the part before failed"):
            answers.killed(FakeServer(), [], answering())

    def test_acceptance_fails_for_changed_bytes_after_a_kill(self):
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
        serving([], tmp_path / "logs", program(tmp_path, script, "llm-serving")),
    ):
        pytest.fail("it goes on")


class TestLoad:
    def examine(self, folder, body):
        script = folder / "load.py"
        script.write_text(body)
        return load.examine(1, 10.0, 150.0, folder, script=script)

    def test_contest_load_above_its_time_limit_is_a_fault(self, tmp_path):
        script = tmp_path / "load.py"
        log = "import pathlib; p = pathlib.Path('testLog'); p.mkdir(exist_ok=True)\n"
        script.write_text(log + "(p / 'a.log').write_text('All Tasks Done; Exec Time is 701.25')")
        found = load.examine(1, 10.0, 150.0, tmp_path, True, script)
        assert found.faults == ["the contest's load takes 701 s; the contest's server took 674 s"]
        assert load.examine(1, 3.0, 5.0, tmp_path, True, script).verdict == "passed"

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


@pytest.fixture
def options(tmp_path):
    """Command line of a rehearsal that writes into the test's folder."""
    return ["--device", "cpu", "--report", str(tmp_path / "report.md"), "--logs", str(tmp_path / "logs")]


def test_acceptance_parts_run_in_order_without_a_server(monkeypatch, options, tmp_path):
    monkeypatch.setattr(precision, "examine", lambda *given: Outcome(precision.TITLE))
    given = []

    @contextmanager
    def missing(arguments, folder):
        given.append((arguments[1], folder.name))
        assert "device_config.kernels=primitives" in arguments
        raise PartError("the server does not start, exit code 2: no kernel")
        yield

    monkeypatch.setattr(run, "serving", missing)
    assert run.main(options) == 1
    titles = re.findall(r"(?m)^## (.*): \w+$", (tmp_path / "report.md").read_text())
    assert titles == ["Environment", "Precision", "Server of demo", "Warnings of MindSpore and CANN"]
    assert "- **the server does not start, exit code 2: no kernel**" in (tmp_path / "report.md").read_text()
    model = str(write_config(tmp_path / "model"))
    assert run.main([*options, "--model", model]) == 1
    assert given == [("demo", "server-0"), ("demo", "server-0"), (model, "server-1")]
    assert len(list(tmp_path.glob("logs.*"))) == 1, "the logs of the first run have another name"


def test_failed_acceptance_part_does_not_stop_the_next_one(monkeypatch, options, tmp_path):
    def breaks(*given):
        raise OSError("npu-smi cannot be run")

    @contextmanager
    def started(arguments, folder):
        folder.mkdir()
        yield argparse.Namespace(port=9, folder=folder)

    monkeypatch.setattr(environment, "examine", breaks)
    monkeypatch.setattr(precision, "examine", lambda *given: Outcome(precision.TITLE))
    monkeypatch.setattr(run, "serving", started)
    for module, name in (
        (answers, "same_bytes"),
        (answers, "right"),
        (long_context, "examine"),
        (step_time, "examine"),
    ):
        monkeypatch.setattr(module, name, breaking)
    monkeypatch.setattr(load, "examine", lambda *given: Outcome(load.TITLE))
    assert run.main(options) == 1
    text = (tmp_path / "report.md").read_text()
    assert "- **OSError: npu-smi cannot be run**" in text
    assert text.count("- **a request is refused with 500: no kernel**") == 4
    assert "- **there are no answers to compare with: the part before failed**" in text
    assert "| Load | passed |" in text


def test_acceptance_report_has_every_verdict_and_fault(options, tmp_path, monkeypatch):
    outcomes = [Outcome("Environment", ["all there"]), Outcome.failed("Load", "it ends with 1")]
    monkeypatch.setattr(run, "parts", lambda arguments, command: iter(outcomes))
    assert run.main(options) == 1
    text = (tmp_path / "report.md").read_text()
    assert text == report("Acceptance of cpu, model demo, float16", outcomes)
    for line in ("| Environment | passed |", "| Load | FAILED |", "all there", "- **it ends with 1**"):
        assert line in text.splitlines()


def test_device_acceptance_command_has_a_help():
    script = run.__file__.split("/tests/")[0] + "/scripts/ascend_acceptance.sh"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
