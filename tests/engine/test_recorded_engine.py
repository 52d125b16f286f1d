"""Recordings of an engine with beam searches, aborts and failed steps replay to the same decisions."""

from __future__ import annotations

import pytest
import support.engine_harness
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.config.sections.scheduler import SchedulerConfig
from llm_serving.core.request import Request
from llm_serving.core.sampling_params import BeamSearchParams
from llm_serving.core.step import StepOutput
from llm_serving.engine.replica import build_scheduler
from llm_serving.executor.executor import StepFailedError
from llm_serving.scheduler import Scheduler
from support.engine_harness import Harness
from support.factories import create_config, create_request
from support.recordings import MemoryFiles, create_recorded, read, replay, seal

arrivals = st.lists(
    st.tuples(
        st.integers(0, 8),  # step of arrival
        st.integers(1, 20),  # prompt tokens
        st.integers(1, 6),  # output tokens
        st.sampled_from([0, 0, 2, 3]),  # beams
        st.sampled_from([None, None, 1, 4]),  # steps until it is aborted
    ),
    min_size=1,
    max_size=6,
)


def create(index: int, num_prompt: int, max_tokens: int, width: int) -> Request:
    request = create_request(num_prompt, max_tokens=max_tokens, seed=index, priority=index % 3 - 1)
    if width:
        request.beam_search = BeamSearchParams(width=width, num_returned=width)
    return request


def fail_sometimes(harness: Harness, places: set[int]) -> None:
    collect, count = harness.executor.collect, iter(range(10**6))

    def collect_or_fail() -> StepOutput:
        output = collect()
        if next(count) in places:
            raise StepFailedError("bad luck")
        return output

    harness.executor.collect = collect_or_fail


@settings(max_examples=60)
@given(
    arrivals=arrivals,
    ahead=st.booleans(),
    num_swap_blocks=st.sampled_from([0, 12]),
    fails_at=st.sets(st.integers(1, 30), max_size=2),
    max_file_bytes=st.sampled_from([1, 2**24]),
)
def test_each_recording_file_of_an_engine_replays_to_its_hash(
    arrivals: list[tuple[int, int, int, int, int | None]],
    ahead: bool,
    num_swap_blocks: int,
    fails_at: set[int],
    max_file_bytes: int,
) -> None:
    files = MemoryFiles()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            support.engine_harness,
            "create_scheduler",
            lambda **options: create_recorded(files, max_file_bytes, **options),
        )
        harness = Harness(
            ahead=ahead,
            num_blocks=16,
            num_swap_blocks=num_swap_blocks,
            preemption_mode="auto",
            prefix_caching=True,
            max_num_seqs=4,
            max_num_batched_tokens=12,
            max_overtakes=2,
        )
    fail_sometimes(harness, fails_at)
    requests = [create(index, *kinds) for index, (_, *kinds, _) in enumerate(arrivals)]
    for step in range(14):
        for (arrival, *_, abort), request in zip(arrivals, requests, strict=True):
            if arrival == step:
                harness.engine.submit(request)
            if abort is not None and arrival + abort == step:
                harness.engine.abort(request.request_id)
        harness.engine.step()
    harness.run()
    assert files.is_open
    replays = [replay(data) for data in files.files]
    assert [each.hash for each in replays] == [seal(data) for data in files.files]
    assert replays[-1].next_step == harness.scheduler._step
    kinds = {type(entry.record).__name__ for data in files.files for entry in read(data)}
    assert {"Added", "ScheduleCalled", "Decided", "Updated"} <= kinds


def test_engine_records_to_the_configured_path(tmp_path, caplog) -> None:
    assert type(build_scheduler(create_config(), 8)) is Scheduler
    assert SchedulerConfig().record_path is None
    caplog.set_level("INFO")
    scheduler = build_scheduler(create_config(policy="mixed", record_path=tmp_path), 8, index=3)
    scheduler.add(create_request(4))
    assert scheduler.schedule(0.0) is not None
    del scheduler  # what is dropped is recorded no further
    (path,) = tmp_path.iterdir()
    assert path.name == "replica-3-000001.rec"
    replayed = replay(path.read_bytes())
    assert (replayed.num_events, replayed.num_decisions) == (2, 1)
    assert f"replica-3: ended the recording events=2 decisions=1 hash={replayed.hash}" in caplog.text
