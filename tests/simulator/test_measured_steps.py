from pathlib import Path

import pytest
from llm_serving.errors import RecordingError
from llm_serving_simulator.profile import StepShape
from llm_serving_simulator.recordings import read_timings
from support.factories import create_request
from support.recordings import MemoryFiles, create_recorded


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def recorded():
    """Return a recording of a prompt alone, and two steps of which the second was scheduled ahead."""
    files, clock = MemoryFiles(), Clock()
    scheduler = create_recorded(files, clock=clock)
    scheduler.add(create_request(6, request_id="a", arrival_time=1.0))
    prompt = scheduler.schedule(1.5)
    clock.now = 2.0
    scheduler.update(prompt, [7])
    first = scheduler.schedule(2.25)
    ahead = scheduler.schedule(2.5)
    clock.now = 3.0
    scheduler.update(first, [8])
    clock.now = 3.75
    scheduler.update(ahead, [9])
    return files.files[0]


def written(data: bytes, folder: Path) -> Path:
    (folder / "a.rec").write_bytes(data)
    return folder / "a.rec"


def test_measured_steps_have_shapes_and_times(recorded, tmp_path):
    timings = read_timings([written(recorded, tmp_path)])
    prompt, first, ahead = timings.steps
    assert prompt.shape == StepShape(rows=1, tokens=6, samples=1, context=6, pairs=21, moves=0)
    assert ahead.shape == StepShape(rows=1, tokens=1, samples=1, context=8, pairs=0, moves=0, sent=1)
    assert (prompt.arrival_s, prompt.seconds, prompt.next_schedule_s) == (1.0, 0.5, 2.25)
    assert (first.ahead, first.seconds) == (False, 0.75)
    assert (ahead.ahead, ahead.seconds) == (True, 0.75)


def test_measured_reply_time_excludes_steps_scheduled_late(tmp_path):
    """The master waits after a long step, while the next one runs; it does not after short ones."""
    files, clock = MemoryFiles(), Clock()
    scheduler = create_recorded(files, clock=clock)
    scheduler.add(create_request(6, request_id="a", max_tokens=20, arrival_time=1.0))
    in_flight = [scheduler.schedule(1.0)]
    for clock.now, asks in ((1.5, 1.75), (1.51, 1.515), (1.52, 1.522), (1.53, 1.531)):
        if len(in_flight) < 2:
            in_flight.append(scheduler.schedule(1.1))
        scheduler.update(in_flight.pop(0), [7])
        in_flight.append(scheduler.schedule(asks))
    steps = read_timings([written(files.files[0], tmp_path)]).steps
    assert [each.next_schedule_s for each in steps] == [None, None, 1.522, 1.531]


def test_measured_step_counts_requests_read_during_it(tmp_path):
    files, clock = MemoryFiles(), Clock()
    scheduler = create_recorded(files, clock=clock)
    scheduler.add(create_request(6, request_id="a", arrival_time=1.0))
    prompt = scheduler.schedule(1.5)
    for name, time in (("b", 1.25), ("c", 1.75), ("d", 1.875), ("e", 2.5)):
        scheduler.add(create_request(6, request_id=name, arrival_time=time))
    clock.now = 2.0
    scheduler.update(prompt, [7])
    (step,) = read_timings([written(files.files[0], tmp_path)]).steps
    assert step.shape.read == 2  # requests c and d


def test_measured_requests_have_arrival_and_token_times(recorded, tmp_path):
    timings = read_timings([written(recorded, tmp_path)])
    assert timings.arrivals == {"a": 1.0}
    assert timings.replies == {"a": [2.0, 3.0, 3.75]}


def test_accepted_drafts_are_tokens_of_their_reply(tmp_path):
    files, clock = MemoryFiles(), Clock()
    scheduler = create_recorded(files, clock=clock)
    request = create_request(4, request_id="a", max_tokens=20)
    scheduler.add(request)
    for clock.now, draft, chosen in ((1.0, [], [7]), (2.0, [8, 9, 5], [8, 9, 10, 11]), (3.0, [], [12])):
        scheduler.set_draft_tokens(request, draft)
        scheduler.update(scheduler.schedule(0.0), chosen)
    timings = read_timings([written(files.files[0], tmp_path)])
    assert timings.replies == {"a": [1.0, 2.0, 2.0, 2.0, 3.0]}
    assert [step.shape.samples for step in timings.steps] == [1, 4, 1]


def test_measured_requests_keep_their_names_in_later_files(tmp_path):
    files, clock = MemoryFiles(), Clock()
    scheduler = create_recorded(files, max_file_bytes=200, clock=clock)
    for number in range(100):
        scheduler.add(create_request(4, request_id=str(number), max_tokens=1))
        clock.now = float(number)
        scheduler.update(scheduler.schedule(0.0), [7])
    assert len(files.files) > 1
    for number, data in enumerate(files.files):
        (tmp_path / f"{number}.rec").write_bytes(data)
    timings = read_timings(sorted(tmp_path.glob("*.rec")))
    assert timings.replies.items() <= {str(number): [float(number)] for number in range(100)}.items()
    assert len(timings.replies) > 95  # a step in flight at the end of a file belongs to no file


def test_damaged_recording_error_names_the_file(recorded, tmp_path):
    with pytest.raises(RecordingError, match=r"a\.rec: record \d+ at byte \d+ is damaged"):
        read_timings([written(recorded[:-20] + b"\0" + recorded[-19:], tmp_path)])
