"""The replay page of a recording: rows, waiting requests with reasons, and preemptions of each step."""

from __future__ import annotations

import io

from llm_serving_tools.recordings.reader import Reader
from llm_serving_tools.recordings.replay import Replay
from llm_serving_tools.recordings.report import MAX_WAITING, ReplayPageBuilder, ReplayPageData
from support.factories import create_request, run_step
from support.recordings import MemoryFiles, create_recorded


def recorded() -> bytes:
    """Record one slot: a high request preempts a low one, which runs again later; another low request waits."""
    files = MemoryFiles()
    scheduler = create_recorded(files, max_num_seqs=1)
    scheduler.add(create_request(5, request_id="low", priority=1, max_tokens=6))
    scheduler.add(create_request(5, request_id="behind", priority=1, max_tokens=2))
    run_step(scheduler, now=1.0)
    run_step(scheduler, now=2.0)
    scheduler.add(create_request(3, request_id="high", priority=-1, max_tokens=2))
    while scheduler.has_unfinished_requests:
        run_step(scheduler, now=3.0)
    return files.files[0]


def page_data(data: bytes, until: int | None = None, **limits: int) -> ReplayPageData:
    replay = Replay(Reader(io.BytesIO(data)))
    page = ReplayPageBuilder(replay.scheduler, **limits)
    replay.on_decision = page.add_step
    replay.run(until)
    return page.page_data("replica-0", "1.0")


def test_replay_page_lists_rows_and_waiting_requests_of_each_step():
    page = page_data(recorded())
    names = [each.id for each in page.requests]
    first = page.steps[0]
    assert (first.number, first.time) == (0, 1.0)
    [(request, start, count, samples)] = first.rows
    assert (names[request], start, count, samples) == ("low", 0, 5, True)
    assert [names[request] for request, _ in first.running] == ["low"]
    assert [names[request] for request in first.waiting] == ["behind"]
    assert (first.num_waiting, first.reason) == (1, "no free slot")
    assert names[first.next] == "behind"
    assert first.num_used_blocks == sum(blocks for _, blocks in first.running)


def test_replay_page_lists_preemptions_with_their_class():
    page = page_data(recorded())
    names = [each.id for each in page.requests]
    [step] = [each for each in page.steps if each.preempted]
    [(request, by_class, swapped)] = step.preempted
    assert (names[request], by_class, swapped) == ("low", "high", False)
    assert names[step.waiting[0]] == "low", "a preempted request goes first"
    again = next(each for each in page.steps if each.number > step.number and names[each.rows[0][0]] == "low")
    assert again.rows[0][2] > 1, "it is computed again"


def test_replay_page_keeps_the_newest_steps_and_only_their_requests():
    whole = page_data(recorded())
    page = page_data(recorded(), max_steps=2)
    assert page.steps[-1].number == whole.steps[-1].number
    assert (len(page.steps), page.num_left_out) == (2, len(whole.steps) - 2)
    assert [each.id for each in page.requests] == ["behind"]
    assert page_data(recorded(), until=0).steps == page_data(recorded()).steps[:1]


def test_replay_page_lists_the_first_of_many_waiting_requests():
    files = MemoryFiles()
    scheduler = create_recorded(files, max_num_seqs=1)
    for number in range(MAX_WAITING + 9):
        scheduler.add(create_request(request_id=f"r{number}", max_tokens=1))
    run_step(scheduler)
    [step] = page_data(files.files[0]).steps
    assert (len(step.waiting), step.num_waiting) == (MAX_WAITING, MAX_WAITING + 8)
