"""Replay of recordings: equal decisions, and reports of differences."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.core.request import FinishReason, Request
from llm_serving.errors import RecordingError
from llm_serving.recording.records import (
    FORMAT,
    MAGIC,
    Added,
    Chain,
    Decided,
    RequestFinished,
    ScheduleCalled,
    Updated,
    encode,
)
from llm_serving.recording.snapshot import capture
from llm_serving.scheduler import Schedule, Scheduler
from llm_serving.scheduler.components import SchedulingRules
from llm_serving.scheduler.policies import POLICIES
from llm_serving_tools.recordings.replay import ReplayDiffersError
from llm_serving_tools.recordings.restore import restore
from support.factories import create_classes, create_request, create_scheduler
from support.recordings import MemoryFiles, create_recorded, read, replay, seal, with_record
from support.scheduler_loads import arrivals, create_load, other_rules, scheduler_options

Load = list[tuple[int, int | None, Request]]


def run_load(
    scheduler: Scheduler, load: Load, lost_at: int | None = None, reload: tuple[int, SchedulingRules] | None = None
) -> list[Schedule]:
    """Run all requests to their end as the engine does; at one step the WorkAgent and its cache are lost."""
    done: list[Schedule] = []
    in_flight: list[Schedule] = []
    for step in range(3000):
        for arrival, abort, request in load:
            if arrival == step:
                scheduler.add(request)
            if abort == step:
                scheduler.finish(request, FinishReason.ABORT)
        if step == lost_at:
            in_flight.clear()
            scheduler.reset_cache()
        if reload is not None and step == reload[0]:
            scheduler.reload(reload[1])
        for request in scheduler.running if step % 3 == 0 else []:
            scheduler.set_draft_tokens(request, [7, 7, 8])
        schedule = scheduler.schedule(step / 8)
        if schedule is not None:
            in_flight.append(schedule)
            done.append(schedule)
        if in_flight and (schedule is None or len(in_flight) == scheduler.limits.max_steps_in_flight):
            oldest = in_flight.pop(0)
            samples = [row for row in oldest.rows for _ in range(row.num_samples)]
            # Some end by a stop id, the others by their length.
            scheduler.update(oldest, [9 if (oldest.step + row.request.sequence) % 7 == 0 else 7 for row in samples])
        if step > 26 and not scheduler.has_unfinished_requests and not in_flight:
            return done
    raise AssertionError("the load does not come to an end")


def with_stop_ids(load: Load) -> Load:
    for _, _, request in load:
        if len(request.prompt_token_ids) % 3 == 0:
            request.stop_token_ids = frozenset({9, 11})
    return load


def small_load() -> Load:
    kinds = [(0, 9, 5, 0), (0, 14, 6, 1), (1, 3, 8, -1), (2, 20, 3, 0), (3, 7, 7, 1), (5, 12, 4, -1), (6, 5, 9, 0)]
    return create_load([(*kind, "ab"[index % 2], None, None, False) for index, kind in enumerate(kinds)])


SMALL = {"num_blocks": 12, "max_num_seqs": 3, "max_num_batched_tokens": 12, "max_model_len": 32}


def small_recording(**options: Any) -> bytes:
    files = MemoryFiles()
    run_load(create_recorded(files, **SMALL, **options), small_load())
    (data,) = files.files
    return data


@settings(max_examples=150)
@given(
    arrivals=arrivals,
    options=scheduler_options(),
    lost_at=st.one_of(st.none(), st.integers(1, 20)),
    max_file_bytes=st.sampled_from([1, 2**24]),
    others=scheduler_options(),
    reloaded_at=st.one_of(st.none(), st.integers(1, 20)),
)
def test_replay_makes_the_same_decisions(
    arrivals: list[tuple[Any, ...]],
    options: dict[str, Any],
    lost_at: int | None,
    max_file_bytes: int,
    others: dict[str, Any],
    reloaded_at: int | None,
) -> None:
    """Small files start at arbitrary states, and each file is replayed separately."""
    files = MemoryFiles()
    recorded = create_recorded(files, max_file_bytes, **options)
    reload = None if reloaded_at is None else (reloaded_at, other_rules(options, others))
    schedules = run_load(recorded, with_stop_ids(create_load(arrivals)), lost_at, reload)
    replays = [replay(data) for data in files.files]
    assert [each.hash for each in replays] == [seal(data) for data in files.files]
    assert replays[-1].next_step == len(schedules)
    final = replays[-1].scheduler
    assert not final.has_unfinished_requests
    state = {name: value for name, value in vars(recorded).items() if name != "_recorder"}
    assert capture(vars(final))[1][-1] == capture(state)[1][-1]


@settings(max_examples=60)
@given(arrivals=arrivals, options=scheduler_options())
def test_recording_and_explaining_change_no_decision(arrivals: list[tuple[Any, ...]], options: dict[str, Any]) -> None:
    files = MemoryFiles()
    recorded = run_load(create_recorded(files, **options), create_load(arrivals))
    plain = run_load(create_scheduler(**options), create_load(arrivals))
    assert [_facts(schedule) for schedule in recorded] == [_facts(schedule) for schedule in plain]
    for step in range(0, len(recorded), 5):
        explanation = replay(files.files[0], step, explain=True).explanation
        assert f"step {step} computes {recorded[step].num_tokens} tokens" in explanation


def _facts(schedule: Schedule) -> tuple[Any, ...]:
    rows = [(row.request.sequence, *row[1:]) for row in schedule.rows]
    return schedule.step, rows, schedule.block_moves, [request.sequence for request in schedule.preempted]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap", "auto"])
def test_replay_repeats_decisions_of_every_policy_and_preemption_mode(
    policy: str, separate: bool, preemption_mode: str
) -> None:
    options = {"policy": policy, "separate": separate, "num_swap_blocks": 8, "max_preemptions": 2}
    options["num_spare_states"] = 3 if separate else None
    data = small_recording(preemption_mode=preemption_mode, prefix_caching=True, **options)
    assert replay(data).hash == seal(data)


def test_loads_of_the_replay_tests_have_drafts() -> None:
    done = run_load(create_scheduler(**SMALL), small_load())
    assert sum(row.num_drafts for schedule in done for row in schedule.rows) >= 10


def test_replay_repeats_a_paused_request_that_resumes_with_another_token() -> None:
    files = MemoryFiles()
    recorded = create_recorded(files, prefix_caching=True, **SMALL)
    parent = create_request(6, max_tokens=8)
    parent.needs_known_output = parent.is_beam = True
    recorded.add(parent)
    for _ in range(3):
        schedule = recorded.schedule(0.0)
        assert schedule is not None
        recorded.update(schedule, [7])
    recorded.pause(parent)
    assert recorded.schedule(0.0) is None
    fork = create_request(6, max_tokens=8, fork_of=parent.request_id)
    fork.output_token_ids = [7, 7, 3]
    fork.last_scheduled_step = parent.last_scheduled_step
    parent.output_token_ids[-1] = 5
    recorded.resume(parent)
    recorded.add(fork)
    run_load(recorded, [])
    (data,) = files.files
    replayed = replay(data)
    assert replayed.hash == seal(data)
    other = replay(data, until=3)
    (again,) = (request for request in other.scheduler.running if request.request_id == parent.request_id)
    assert again.output_token_ids == [7, 7, 5]


def test_changed_deadline_counts_when_a_request_is_queued_again() -> None:
    files = MemoryFiles()
    recorded = create_recorded(files, order="deadline", max_num_seqs=1, max_overtakes=4)
    first, second = (create_request(4, request_id=name, max_tokens=1) for name in ("first", "second"))
    first.deadline, second.deadline = 10.0, 20.0
    for request in (first, second):
        recorded.add(request)
    recorded.set_deadline(first, 30.0)
    for request in (first, second):
        recorded.set_priority(request, 1)
    order = [schedule.rows[0].request.request_id for schedule in run_load(recorded, [])]
    assert order == ["second", "first"]
    (data,) = files.files
    assert replay(data).hash == seal(data)


def test_recording_has_all_request_fields_that_decisions_depend_on() -> None:
    """A new field of `Request` belongs either in `Added` or in the second list here."""
    derived = {"sequence", "request_class", "queue_key", "status", "paused", "num_computed_tokens", "admission_number"}
    derived |= {"num_confirmed_tokens", "num_cached_tokens", "num_tokens_in_flight", "num_preemptions"}
    derived |= {
        "arrival_clock",
        "num_prompt_logprobs_received",
        "class_change_step",
        "wait_bound",
        "num_steps_waited",
        "first_scheduled_time",
        "running_since",
        "class_sequence",
        "class_entry_step",
        "draft_token_ids",
        "is_migrating",
    }
    irrelevant = {
        "constraint",
        "matcher",
        "beam_search",
        "sink",
        "http_timings",
        "num_lost_steps",
        "num_tokens_at_loss",
        "num_new_tokens",
        "finish_reason",
        "stop_reason",
    }
    recorded = (set(Added.__struct_fields__) - {"max_tokens"}) | {"sampling"}
    assert {field.name for field in fields(Request)} == recorded | derived | irrelevant


@pytest.mark.parametrize("path", sorted(Path(__file__).parent.glob("format_*/*")), ids=lambda path: path.stem)
def test_recording_of_an_older_format_replays_to_its_own_hash(path: Path) -> None:
    """Two recordings are of the time before classes were renamed, one of them with tenant limits."""
    data = path.read_bytes()
    result = replay(data)
    assert result.hash == seal(data)
    assert result.num_decisions > 20
    result.scheduler.check_integrity()


# What is not the same


def test_replay_shows_a_changed_decision_row_by_row() -> None:
    data = small_recording()
    entry = next(each for each in read(data) if isinstance(each.record, Decided) and each.record.step == 4)
    assert isinstance(entry.record, Decided)
    sequence, num_computed, query_len, *rest = entry.record.rows[-1]
    rows = [*entry.record.rows[:-1], (sequence, num_computed, query_len + 1, *rest)]
    changed = with_record(data, entry.number, msgspec.structs.replace(entry.record, rows=rows))
    assert len(read(changed)) == len(read(data))
    with pytest.raises(ReplayDiffersError) as caught:
        replay(changed)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"step 4 differs (record {entry.number} at byte {entry.offset})"
    assert lines[1] == f"  row {len(rows) - 1}"
    assert lines[2].startswith("    recorded: ") and f"tokens {num_computed} to {num_computed + query_len}," in lines[2]
    assert lines[3].startswith("    replayed: ") and f"to {num_computed + query_len - 1}," in lines[3]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (Added, {"max_tokens": 2}),
        (Added, {"priority": 1}),
        (Updated, {"token_ids": []}),
        (RequestFinished, {"sequence": 99}),
    ],
)
def test_replay_detects_a_changed_event(kind: type, changes: dict[str, Any]) -> None:
    files = MemoryFiles()
    load = [(arrival, 4 if index == 1 else None, each) for index, (arrival, _, each) in enumerate(small_load())]
    run_load(create_recorded(files, **SMALL), load)
    (data,) = files.files
    entry = next(each for each in read(data) if isinstance(each.record, kind))
    changed = with_record(data, entry.number, msgspec.structs.replace(entry.record, **changes))
    with pytest.raises(ReplayDiffersError, match=r"differs|fails"):
        replay(changed)


def test_changed_time_without_another_decision_changes_the_hash() -> None:
    data = small_recording()
    entry = next(each for each in read(data) if isinstance(each.record, ScheduleCalled))
    assert replay(with_record(data, entry.number, ScheduleCalled(0.001))).hash != seal(data)


PLACES = st.integers(0, 2**20 - 1)
"""Positions in a recording, taken modulo its length, which depends on the digits of request names."""


@settings(max_examples=60)
@given(PLACES, st.integers(1, 255))
def test_reader_detects_every_changed_byte(place: int, bits: int) -> None:
    data = small_recording()
    changed = bytearray(data)
    changed[place % len(data)] ^= bits
    with pytest.raises(RecordingError, match=r"damaged|not a recording"):
        replay(bytes(changed))


@settings(max_examples=60)
@given(PLACES)
def test_truncated_file_is_replayed_to_its_last_complete_record(place: int) -> None:
    data = small_recording()
    entries = read(data)
    first = entries[0].offset
    length = first + place % (len(data) - first)
    ends = [each.offset for each in entries]
    replayed = replay(data[:length])
    assert replayed._reader.torn_at == (None if length in ends else max(end for end in ends if end < length))
    whole = max(end for end in ends if end <= length)
    assert replayed.hash == seal(data[:whole])


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "is not a recording"),
        (b"pa_config:\n    block_size: 16\n" * 4, "is not a recording"),
        (MAGIC, "ends within its header"),
        (MAGIC + b"\x10", "ends within its header"),
    ],
)
def test_reader_refuses_other_files(data: bytes, text: str) -> None:
    with pytest.raises(RecordingError, match=text):
        replay(data)


def test_replay_refuses_another_format_and_another_state() -> None:
    data = small_recording()
    reader = replay(data)._reader
    for changes, text in [
        ({"format": 99}, f"has format 99; this version reads formats 14, 17, {FORMAT}"),
        ({"nodes": [["scheduler.scheduler:Lost", []]]}, "does not match this version"),
        ({"nodes": [["config.loader:Path", []]]}, "cannot be part of a scheduler's state"),
        ({"nodes": []}, "does not match this version"),
        ({"nodes": [["array", [2**40], "i"]]}, "does not match this version"),
        ({"nodes": [["list", [1, 2, 3]]]}, "does not match this version"),
        ({"nodes": [["dict", [], []], ["tuple", [[0], [0]]]]}, "does not match this version"),
    ]:
        header = msgspec.structs.replace(reader.header, **changes)
        with pytest.raises(RecordingError, match=text):
            replay(MAGIC + Chain().frame(encode(header)))


def test_reader_refuses_an_invalid_record_with_a_valid_seal() -> None:
    reader, chain = replay(small_recording())._reader, Chain()
    for nonsense in (b"\x93\xa6finish\x01\xa1\xff", b"\x93\xa6finish\x01" + b"\x91" * 5000):
        with pytest.raises(RecordingError, match=r"record 1 at byte \d+ is damaged"):
            replay(MAGIC + chain.frame(reader.header_payload) + chain.frame(nonsense))
        chain = Chain()


def test_replay_error_names_the_available_steps() -> None:
    with pytest.raises(RecordingError, match=r"has steps 0 to \d+, not step 5000"):
        replay(small_recording(), until=5000)


def test_replay_reproduces_a_scheduler_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    files = MemoryFiles()
    recorded = create_recorded(files, **SMALL)
    recorded.add(create_request(6))
    original = Scheduler.schedule

    def fail_at_step_1(self: Scheduler, now: float) -> Schedule | None:
        if self._step == 1:
            raise RuntimeError("out of order")
        return original(self, now)

    monkeypatch.setattr(Scheduler, "schedule", fail_at_step_1)
    schedule = recorded.schedule(0.0)
    assert schedule is not None
    recorded.update(schedule, [7])
    with pytest.raises(RuntimeError):
        recorded.schedule(0.0)
    (data,) = files.files
    with pytest.raises(ReplayDiffersError, match=r"`schedule` before step 1 .* fails: RuntimeError"):
        replay(data)
    monkeypatch.setattr(Scheduler, "schedule", original)
    recorded.finish(recorded.running[0], FinishReason.ERROR)
    with pytest.raises(ReplayDiffersError, match=r"step 1 differs .*\n  recorded: no decision; `schedule` failed"):
        replay(files.files[0])


def test_recorder_failure_stops_only_the_recording(caplog: pytest.LogCaptureFixture) -> None:
    files = MemoryFiles()
    recorded = create_recorded(files, **SMALL)
    vars(recorded)["addition"] = object()  # a state that nobody knows how to write
    run_load(recorded, small_load())
    assert files.files == []
    assert [record.message for record in caplog.records] == [
        "scheduler: stopped the recording because of an error, serving continues"
    ]


# In words


def test_replay_explains_waiting_requests_of_a_step() -> None:
    files = MemoryFiles()
    options = {"num_blocks": 10, "max_num_seqs": 2, "max_num_batched_tokens": 12, "max_model_len": 32}
    recorded = create_recorded(files, **options)
    load = [(0, None, create_request(9, request_id=f"r{index}", max_tokens=4)) for index in range(4)]
    run_load(recorded, load)
    text = replay(files.files[0], 3, explain=True).explanation
    assert "before step 3: 2 of 2 slots run, 2 requests wait" in text
    assert "waiting in class normal: 2" in text
    assert "next is r2; it waits: no free slot; 2 of 2 are in use" in text
    assert "r3" in text
    assert "of 10 used" in text


def test_replay_explains_a_class_at_its_share_limit() -> None:
    files = MemoryFiles()
    recorded = create_recorded(files, max_num_seqs=2, classes=create_classes(low={"max_running_share": 0.5}))
    run_load(recorded, [(0, None, create_request(5, request_id=f"r{index}", priority=1)) for index in range(2)])
    text = replay(files.files[0], 1, explain=True).explanation
    assert "r1 waits: share limit of its class: low has 1 of the 1 slots" in text


# The state


def test_snapshots_of_equal_sets_are_equal() -> None:
    grown, shrunk = {0, 8}, {8, 0}
    assert list(grown) != list(shrunk), "members that meet in the table keep the order in which they came"
    assert capture(grown) == capture(shrunk) == capture({*range(1000)} & {8, 0})


def test_snapshot_restores_the_state() -> None:
    scheduler = create_scheduler(prefix_caching=True, max_overtakes=2, **SMALL)
    for arrival, _, request in small_load():
        scheduler.add(request)
        schedule = scheduler.schedule(float(arrival))
        if schedule is not None:
            scheduler.update(schedule, [7] * sum(row.num_samples for row in schedule.rows))
    layouts, nodes = capture(vars(scheduler))
    again = object.__new__(Scheduler)
    vars(again).update(restore(layouts, msgspec.msgpack.decode(msgspec.msgpack.encode(nodes))))
    again.check_integrity()
    assert capture(vars(again)) == (layouts, nodes)
    assert again.running[0].request_class in again.classes
