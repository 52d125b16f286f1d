"""Advice from a recorded workload, and the process that computes it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from llm_serving.admission.admission_control import RefusedRequests
from llm_serving.config import load_config
from llm_serving.config.reload import check_reload
from llm_serving.config.report import describe
from llm_serving.errors import ConfigError, RecordingError
from llm_serving_simulator import advice as advice_module
from llm_serving_simulator.advice import AdviceQuestion, advise, answer, line_for, newest
from llm_serving_simulator.commands.advice import described
from llm_serving_simulator.recordings import read_recorded_files
from llm_serving_simulator.tuner.problem import SearchParameter
from msgspec import to_builtins
from support.factories import create_request
from support.recordings import MemoryFiles, create_recorded
from support.simulator_workloads import config_with, create_load, create_profile

SLOTS = "model_config.decode_batch_size"


def configure(**overrides: Any) -> Any:
    return lambda changes: config_with(**overrides, **dict(each.split("=") for each in changes))


@pytest.fixture(autouse=True)
def slots_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the search to the running slots, because each neighbour takes a simulation."""
    every = advice_module.neighbours
    monkeypatch.setattr(
        advice_module, "neighbours", lambda *asked: [each for each in every(*asked) if each[0].key == SLOTS]
    )


def test_advice_recommends_more_slots() -> None:
    load = create_load(*[0.001 * number for number in range(40)], num_output_tokens=8, max_tokens=8)
    few = configure(model_config__decode_batch_size=4)
    advice = advise(few, load, create_profile(num_blocks=400), 0.07, budget_s=60.0)
    assert advice.played > 3 and (advice.not_played, advice.refused) == (0, 0)
    (found,) = advice.otherwise
    assert (found.was, found.source) == ("4", "--set")
    # no request waits for a slot then; the values up to it were simulated one after the other
    assert int(found.value) >= 16
    assert found.line == f"model_config: {{decode_batch_size: {found.value}}}"
    assert found.needs_restart  # WorkAgents were loaded for four slots
    assert {"output_tokens_per_s", "ttft_p99_ms"} <= {each.figure for each in found.better}
    assert "tpot_p99_ms" in {each.figure for each in found.worse} and not advice.advised
    lines = list(described(to_builtins(advice)))
    assert lines[0].startswith("40 requests of 0 s, ") and lines[0].endswith("off by 7% at the median")
    assert f"    # {SLOTS} is 4 (--set); takes a restart" in "\n".join(lines)


@pytest.mark.parametrize(("own", "needs_restart"), [("fcfs", True), ("mixed", False)])
def test_advice_marks_a_policy_that_needs_a_restart(own: str, needs_restart: bool) -> None:
    values = ("prefill_first", "throughput", own)
    knob = SearchParameter("scheduler_config.policy", values, 2, ordered=False)
    assert advice_module._needs_restart(knob, "throughput") is needs_restart
    running = config_with(scheduler_config__policy=own)
    read = config_with(scheduler_config__policy="throughput")
    try:
        check_reload(running, running, read)
    except ConfigError:
        assert needs_restart
    else:
        assert not needs_restart


OWN_CLASSES = "request_classes: {people: {rank: 0, weight: 2}, machines: {rank: 1}}\n"


@pytest.mark.parametrize(("text", "row"), [("{}\n", "standard"), (OWN_CLASSES, "people")])
@pytest.mark.parametrize(("name", "value"), [("weight", 32), ("max_kv_share", 0.5)])
def test_advice_line_for_a_class_is_valid_yaml(tmp_path: Path, text: str, row: str, name: str, value: object) -> None:
    """A given section of rows replaces all default rows."""
    path, key = tmp_path / "my.yaml", f"request_classes.{row}.{name}"
    path.write_text(text)
    line = line_for(load_config(path), key, value)
    if text == OWN_CLASSES:
        assert line == f"request_classes: {{people: {{{name}: {value}}}}}"  # an existing row gets the key
        return
    expected = load_config(path, [f"{key}={value}"]).request_classes
    path.write_text(line)
    assert load_config(path).request_classes == expected


def test_advice_lists_neighbours_without_simulation_time() -> None:
    load = create_load(*[0.001 * number for number in range(40)])
    advice = advise(configure(), load, create_profile(num_blocks=400), 0.0, budget_s=0.0)
    assert (advice.played, advice.not_played) == (0, 2)
    assert list(described(to_builtins(advice)))[1].startswith("there was no time for any simulation")


def test_advice_needs_enough_requests() -> None:
    with pytest.raises(RecordingError, match=r"at least 20 requests\. Given: 3"):
        advise(configure(), create_load(0.0, 1.0, 2.0), create_profile(), 0.0, budget_s=9.0)


def test_advice_distinguishes_too_little_time_from_too_few_requests() -> None:
    load = create_load(*[float(number) for number in range(100)])
    with pytest.raises(RecordingError, match=r"^simulating the newest 25 requests takes more than -0\.0333 s$"):
        advise(configure(), load, create_profile(num_blocks=400), 0.0, budget_s=-1.0)


def test_newest_requests_of_a_recording_start_at_time_0() -> None:
    kept = newest(create_load(0.0, 1.0, 2.0, 3.0), 0.5)
    assert [each.due_s for stream in kept.streams for each in stream.requests] == [0.0, 1.0]


def recorded(folder: Path, num_requests: int) -> float:
    """Record requests one after the other; return the arrival of the first."""
    files, times = MemoryFiles(), iter(range(10**6))
    began = time.monotonic() - 10.0
    scheduler = create_recorded(files, clock=lambda: began + 0.01 * next(times))
    for number in range(num_requests):
        request = create_request(4, request_id=f"r{number}", max_tokens=8, seed=number)
        request.arrival_time = began + 0.05 * number
        scheduler.add(request)
        while (step := scheduler.schedule(began)) is not None:
            scheduler.update(step, [7] * step.num_samples)
    folder.mkdir(exist_ok=True)
    (folder / "replica-0-000001.rec").write_bytes(files.files[0])
    return began


def test_advice_answers_from_the_recording(tmp_path: Path) -> None:
    since = recorded(tmp_path / "records", 30)
    config = config_with(model_config__decode_batch_size=4)
    sources = {**config.sources, SLOTS: "my.yaml:3"}
    question = AdviceQuestion(describe(config), sources, str(tmp_path / "records"), since, 60.0)
    advice = answer(question)
    assert advice.requests == 30
    assert all(each.source == "my.yaml:3" for each in (*advice.advised, *advice.otherwise) if each.key == SLOTS)
    assert advice.refused == 0
    question.refused = [RefusedRequests(since + 0.02 * number, (5, 6), 10, "a") for number in range(12)]
    both = answer(question)
    assert (both.requests, both.refused) == (54, 24)
    assert next(iter(described(to_builtins(both)))).startswith("54 requests (24 of them refused) of 1 s")
    question.refused = []
    question.since = since + 0.4
    assert answer(question).requests < 30  # earlier requests are excluded
    question.folder = str(tmp_path)
    with pytest.raises(RecordingError, match="nothing was recorded in that time"):
        answer(question)


def test_advice_gives_refused_requests_answers_of_other_requests(tmp_path: Path) -> None:
    since = recorded(tmp_path / "records", 30)
    files = sorted((tmp_path / "records").glob("*.rec"))
    load = read_recorded_files(files, "n", since, [RefusedRequests(since - 1.0, (5, 40), 7, "b")])
    asked = load.streams[0].requests
    first, second, *rest = asked
    assert [len(each.prompt_token_ids) for each in (first, second)] == [5, 40]
    assert (first.due_s, first.priority, first.tenant, first.stream) == (0.0, 7, "b", "refused")
    assert {each.num_output_tokens for each in asked} == {each.num_output_tokens for each in rest}
    assert rest[0].due_s == pytest.approx(1.0) and len(rest) == 30
    with pytest.raises(RecordingError, match="has no requests but the 1 that admission control refused"):
        read_recorded_files(files, "n", since + 100, [RefusedRequests(since, (5,), 7, "b")])
