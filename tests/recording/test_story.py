"""The story of a recording: rows, waiting requests with reasons, and preemptions of each step."""

from __future__ import annotations

import io

from llm_serving.recording.records import Reader
from llm_serving.recording.replay import Replay
from llm_serving.recording.report import MAX_WAITING, Story, ToldStory
from support.factories import create_request, run_step
from support.recordings import MemoryFiles, create_recorded


def recorded() -> bytes:
    """One slot: a low request loses it to a high one and comes back; another low one waits behind it."""
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


def told(data: bytes, until: int | None = None, **limits: int) -> ToldStory:
    replay = Replay(Reader(io.BytesIO(data)))
    story = Story(replay.scheduler, **limits)
    replay.on_decision = story.decided
    replay.run(until)
    return story.told("replica-0", "1.0")


def test_story_lists_rows_and_waiting_requests_of_each_step():
    story = told(recorded())
    names = [each.id for each in story.requests]
    first = story.steps[0]
    assert (first.number, first.time) == (0, 1.0)
    [(who, start, count, samples)] = first.rows
    assert (names[who], start, count, samples) == ("low", 0, 5, True)
    assert [names[who] for who, _ in first.running] == ["low"]
    assert [names[who] for who in first.waiting] == ["behind"]
    assert (first.num_waiting, first.reason) == (1, "no free slot")
    assert names[first.next] == "behind"
    assert first.num_used_blocks == sum(blocks for _, blocks in first.running)


def test_story_lists_preemptions_with_their_class():
    story = told(recorded())
    names = [each.id for each in story.requests]
    [step] = [each for each in story.steps if each.preempted]
    [(who, by_class, swapped)] = step.preempted
    assert (names[who], by_class, swapped) == ("low", "high", False)
    assert names[step.waiting[0]] == "low", "a preempted request goes first"
    again = next(each for each in story.steps if each.number > step.number and names[each.rows[0][0]] == "low")
    assert again.rows[0][2] > 1, "it is computed again"


def test_the_newest_steps_are_kept_and_name_their_requests_alone():
    whole = told(recorded())
    story = told(recorded(), most_steps=2)
    assert story.steps[-1].number == whole.steps[-1].number
    assert (len(story.steps), story.num_left_out) == (2, len(whole.steps) - 2)
    assert [each.id for each in story.requests] == ["behind"]
    assert told(recorded(), until=0).steps == told(recorded()).steps[:1]


def test_story_lists_the_first_of_many_waiting_requests():
    files = MemoryFiles()
    scheduler = create_recorded(files, max_num_seqs=1)
    for number in range(MAX_WAITING + 9):
        scheduler.add(create_request(request_id=f"r{number}", max_tokens=1))
    run_step(scheduler)
    [step] = told(files.files[0]).steps
    assert (len(step.waiting), step.num_waiting) == (MAX_WAITING, MAX_WAITING + 8)
