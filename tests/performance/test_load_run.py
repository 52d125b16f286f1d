import ast
import json
import re
import socket

import pytest
import test_serving_performance as command


@pytest.fixture
def run(fake_server, tmp_path, monkeypatch):
    """Run the command in an empty folder with a prompt set of these items."""
    monkeypatch.chdir(tmp_path)

    def run(items, *options):
        (tmp_path / "prompts.json").write_text(json.dumps(items))
        return command.main(["-P", str(fake_server.port), "--dataset", "prompts.json", *options])

    return run


def item(instruction, output="ok", task="greet"):
    return {"instruction": instruction, "input": "", "output": output, "task": task}


PREFIX = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - test_llama\.log - INFO - "
"""Start of each record of the older load test."""


def read_log(folder):
    (log,) = (folder / "testLog").iterdir()
    assert re.fullmatch(r"test_performance_\d{4}-\d\d-\d\d-\d\d_\d\d\.log", log.name)
    return log.read_text().splitlines()


def test_load_test_writes_the_legacy_files_for_the_legacy_command_line(run, tmp_path, capsys):
    assert run([item("Hello"), item("Good morning")], "-X", "200", "-T", "0.02", "-O", "./") == 0
    lines = read_log(tmp_path)
    assert len(lines) == 9
    for line in lines[0:8:2]:
        record = ast.literal_eval(re.fullmatch(f"{PREFIX}(.*)", line)[1])
        assert list(record) == ["input", "resp_text", "res_time", "first_token_time"]
        assert record["resp_text"] == "ok"
        assert 0 < record["first_token_time"] <= record["res_time"]
    assert lines[1:8:2] == [f"Test Progress --> {k}/4" for k in (1, 2, 3, 4)]
    assert re.fullmatch(rf"{PREFIX}All Tasks Done; Exec Time is [\d.]+", lines[8])
    result = json.loads((tmp_path / "result_200_x.json").read_text())
    assert sorted(r["input"] for r in result) == ["Good morning", "Good morning", "Hello", "Hello"]
    output = capsys.readouterr().out
    assert re.search(r"^requests +4$", output, re.M)
    assert re.search(r"^exact match +100\.0% \(4 of 4\)$", output, re.M)
    assert re.search(r"^client CPU +[\d.]+% of one core$", output, re.M)


def test_load_test_reports_wrong_answers(run, fake_server, capsys):
    fake_server.answers["Garbled"] = "ko"
    assert run([item("Hello"), item("Garbled", task="garble")], "--concurrency", "2") == 0
    output = capsys.readouterr().out
    assert re.search(r"^exact match +50\.0% \(1 of 2\)$", output, re.M)
    assert re.search(r"^  garble +0\.0% \(0 of 1\)$", output, re.M)
    assert re.search(r"^  greet +100\.0% \(1 of 1\)$", output, re.M)


@pytest.mark.parametrize("api", ["legacy", "openai"])
def test_load_test_counts_and_explains_failed_requests(run, tmp_path, capsys, api):
    items = [item("Hello"), item("break", "not so"), item("long"), item("refuse")]
    assert run(items, "--concurrency", "4", "--api", api, "--json", "out/run.json") == 1
    captured = capsys.readouterr()
    assert re.search(r"^failed +3$", captured.out, re.M)
    assert "failed: 1 x HTTP 503: the queue is full" in captured.err
    assert "failed: 1 x the server closed the connection inside the body" in captured.err
    document = json.loads((tmp_path / "out/run.json").read_text())
    assert [bool(r["error"]) for r in document["requests"]].count(True) == 3
    assert document["summary"]["num_requests"] == 4
    assert document["summary"]["exact_match"] == {"num_exact": 1, "num_expected": 4}
    assert document["settings"]["api"] == api
    assert len(read_log(tmp_path)) == 9


def test_load_test_requests_the_length_of_the_expected_answer_with_its_end(run, fake_server):
    run([item("Count", "one two three")], "--concurrency", "1", "--api", "openai")
    assert fake_server.bodies[0]["max_tokens"] == 4


def test_load_test_with_ignore_eos_requests_the_exact_length_and_compares_no_answers(run, fake_server, capsys):
    run([item("Count", "one two three")], "--concurrency", "1", "--api", "openai", "--ignore-eos")
    assert fake_server.bodies[0]["max_tokens"] == 3
    assert fake_server.bodies[0]["ignore_eos"] is True
    assert "exact match             - (no expected answers)" in capsys.readouterr().out


def test_load_test_does_not_count_the_warm_up(run, fake_server, capsys):
    assert run([item("Hello")], "-X", "100", "--num-requests", "3", "--warmup", "5") == 0
    assert len(fake_server.bodies) == 8
    assert re.search(r"^requests +3$", capsys.readouterr().out, re.M)


def test_load_test_reports_server_cpu_time_per_token(run, fake_server, capsys):
    run([item("Count", "one two three")], "--concurrency", "1", "--api", "openai")
    assert "server CPU              - (no process_cpu_seconds_total in /metrics)" in capsys.readouterr().out
    fake_server.cpu_s = 7.0
    fake_server.answers["Count"] = "one two three four"
    run([item("Count", "one two three")], "--concurrency", "1", "--api", "openai")
    assert "server CPU              125000 us per output token" in capsys.readouterr().out


def test_load_test_reports_goodput_at_given_targets(run, capsys):
    assert run([item("Hello")], "--concurrency", "1", "--slo-ttft-ms", "60000", "--slo-tpot-ms", "60000") == 0
    output = capsys.readouterr().out
    requests_per_s = re.search(r"^requests/s +([\d.]+)$", output, re.M)[1]
    assert f"goodput                 {requests_per_s} requests/s with TTFT <= 60000 ms and TPOT <= 60000 ms" in output


def test_generated_prompt_set_depends_on_its_seed(run, fake_server):
    options = ("-X", "500", "--num-requests", "4", "--dataset", "alpaca-like", "--seed", "9")
    run([item("unused")], *options)
    run([item("unused")], *options)
    inputs = [body["inputs"] for body in fake_server.bodies]
    assert sorted(inputs[:4]) == sorted(inputs[4:])
    assert len(set(inputs[:4])) == 4


def test_load_test_explains_why_it_cannot_start(run, fake_server, capsys):
    assert run([item("Hello")], "--concurrency", "1", "--model", "gpt") == 2
    assert "error: `--model` must be one of demo, llama2, internlm. Given: gpt" in capsys.readouterr().err
    assert run([], "--concurrency", "1") == 2
    assert "must hold a list of at least one prompt" in capsys.readouterr().err
    assert run([item("break", "not so")], "--concurrency", "1", "--warmup", "1") == 2
    assert "error: the warm-up failed: 1 x the server closed the connection" in capsys.readouterr().err
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert run([item("Hello")], "--concurrency", "1", "-P", str(unused.getsockname()[1])) == 2
    assert "Start the server first, or name another with -P or --url." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give either -X (requests per second) or --concurrency (closed loop)"),
        (["-X", "1", "--concurrency", "1"], "give either -X"),
        (["-X", "1"], "with -X give either -T (seconds) or --num-requests"),
        (["-X", "0", "-T", "1"], "must be a finite number > 0. Given: 0"),
        (["-X", "inf", "-T", "1"], "must be a finite number > 0. Given: inf"),
        (["--concurrency", "1", "--arrivals", "poisson"], "--arrivals needs -X"),
        (["-X", "1", "-T", "1", "--burst-size", "4"], "--burst-size needs --arrivals burst"),
        (["--concurrency", "1", "-T", "1"], "-T needs -X"),
        (["--concurrency", "1", "--ignore-eos"], "--ignore-eos needs --api openai"),
        (["--concurrency", "1", "--priority", "0"], "--priority needs --api openai"),
    ],
)
def test_load_test_refuses_contradictory_options(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.parse_args(options)
    assert message in capsys.readouterr().err


def test_load_test_reports_an_unwritable_folder_before_it_starts(run, fake_server, tmp_path, capsys):
    (tmp_path / "file").touch()
    for options in (["-O", "file"], ["--json", "file/run.json"]):
        assert run([item("Hello")], "--concurrency", "1", *options) == 2
        assert "error: file: File exists" in capsys.readouterr().err
    assert fake_server.bodies == []


def test_load_test_writes_null_where_nothing_was_measured(run, tmp_path):
    assert run([item("Hello")], "--concurrency", "1", "--json", "new/run.json") == 0

    def refuse(name):
        raise AssertionError(name)

    summary = json.loads((tmp_path / "new" / "run.json").read_text(), parse_constant=refuse)["summary"]
    assert summary["tpot_ms"] == {"mean": None, "p50": None, "p99": None}


def test_load_test_shows_a_progress_bar_on_a_terminal():
    import io

    from load_test.metrics import RequestRecord
    from load_test.report import ProgressBar

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    progress = ProgressBar(2, terminal)
    progress.add(RequestRecord(0, "p", "", None, 0, 0, 1))
    progress.add(RequestRecord(1, "p", "", None, 0, 0, 1, error="refused"))
    progress.close()
    assert terminal.getvalue().startswith("\r[###############               ] 1/2 in 0 s ")
    assert "\r[##############################] 2/2 in 0 s, 1 failed \n" in terminal.getvalue()
