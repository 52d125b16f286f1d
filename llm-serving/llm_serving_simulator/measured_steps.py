"""Measured step times, read from recordings of the scheduler."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from llm_serving.errors import ConfigError, RecordingError
from llm_serving.recording.records import Added, CacheReset, Decided, Drafted, Entry, Reader, ScheduleCalled, Updated
from llm_serving.recording.replay import Replay
from llm_serving.scheduler.schedule import count_accepted_tokens
from llm_serving.scheduler.scheduler import Scheduler

from llm_serving_simulator.files import MAX_INTEGER, MAX_NUMBER
from llm_serving_simulator.profile import StepShape, shape_of_rows
from llm_serving_simulator.recorded_workload import torn_notice

LONG_STEP_S: Final = 0.02
"""After a longer step the master waits until the WorkAgent announces the end of the next one, if that is in flight."""


@dataclass(slots=True)
class MeasuredStep:
    """One recorded step; times are those of the master's clock."""

    shape: StepShape
    scheduled_s: float
    """When the engine asked the scheduler for the step."""
    arrival_s: float | None
    """Arrival of the request that the step was scheduled for, if nothing else was computed then."""
    previous_reply_s: float
    """Reply of the step before; minus infinity for the first step."""
    reply_s: float = 0.0
    next_schedule_s: float | None = None
    """When the engine asked for another step after the reply, if it did so at once."""
    sampled: list[int] = field(default_factory=list)
    """`Request.sequence` of each token that the reply brought."""

    @property
    def ahead(self) -> bool:
        """Whether the step was scheduled before the WorkAgent finished the step before it."""
        return self.scheduled_s < self.previous_reply_s

    @property
    def start_s(self) -> float:
        """Earliest start of the step, or of its scheduling if it was not scheduled ahead."""
        return max(self.scheduled_s, self.previous_reply_s)

    @property
    def seconds(self) -> float:
        """Time from the start to the reply; scheduling and sending included unless the step was scheduled ahead."""
        return self.reply_s - self.start_s


@dataclass
class Timings:
    """The times of one or several recordings."""

    steps: list[MeasuredStep] = field(default_factory=list)
    arrivals: dict[str, float] = field(default_factory=dict)
    """Arrival time of each request id."""
    num_blocks: int | None = None
    block_size: int | None = None
    replies: dict[str, list[float]] = field(default_factory=dict)
    """By request id: the reply time of each of its tokens."""
    notices: list[str] = field(default_factory=list)


def read_timings(files: Iterable[Path]) -> Timings:
    """Read the times of recordings, without replaying the decisions.

    Raises:
        ConfigError: A file cannot be read.
        RecordingError: A file is damaged, or has another version.
    """
    timings = Timings()
    for file in files:
        try:
            with file.open("rb") as stream:
                reader = Reader(stream)
                scheduler = Replay(reader).scheduler
                timings.num_blocks = scheduler.blocks.pool.num_blocks
                timings.block_size = scheduler.blocks.block_size
                _read(iter(reader), timings, scheduler)
                timings.notices += torn_notice(file, reader.torn_at)
        except RecordingError as error:
            raise RecordingError(f"{file}: {error}") from None
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}") from None
    _count_arrivals(timings)
    return timings


def _count_arrivals(timings: Timings) -> None:
    """Set `read` of each step to the number of requests that arrived while it ran."""
    times = sorted(timings.arrivals.values())
    for step in timings.steps:
        read = bisect(times, step.reply_s) - bisect(times, step.start_s)
        step.shape = step.shape._replace(read=read)


_Samples = list[tuple[int, int, list[int]]]
"""Of each row that samples tokens: request sequence, number of samples, draft tokens to verify."""


def _read(entries: Iterator[Entry], timings: Timings, scheduler: Scheduler) -> None:
    """Append the entries' steps; `scheduler` is in the state before the entries."""
    in_flight: dict[int, tuple[MeasuredStep, _Samples]] = {}
    names = {each.sequence: each.request_id for each in scheduler._requests.values()}
    drafts: dict[int, list[int]] = {}
    sequence = scheduler.waiting_requests.num_arrivals
    previous_reply_s, arrival_s, scheduled_s, previous_seconds = float("-inf"), None, 0.0, 0.0
    replied: MeasuredStep | None = None
    num_sent = 0
    for entry in entries:
        _check_times(entry)
        match entry.record:
            case Added(request_id=name, arrival_time=time):
                names[sequence] = name
                sequence += 1
                timings.arrivals[name] = time
                arrival_s = time if arrival_s is None else arrival_s
            case Drafted():
                drafts[entry.record.sequence] = entry.record.token_ids
            case ScheduleCalled(now=now):
                scheduled_s = now
                if replied is not None:
                    is_short = max(replied.seconds, previous_seconds) < LONG_STEP_S
                    if is_short if in_flight else arrival_s is None:
                        replied.next_schedule_s = now
                    previous_seconds, replied = replied.seconds, None
            case Decided(step=int(step)) as decided:
                alone = not in_flight and arrival_s is not None and arrival_s > previous_reply_s
                samples = [(row[0], row[3], drafts.pop(row[0], [])[: row[3] - 1]) for row in decided.rows if row[3]]
                measured = MeasuredStep(_shape(decided), scheduled_s, arrival_s if alone else None, previous_reply_s)
                in_flight[step] = measured, samples
                arrival_s = None
            case Updated(step=step, token_ids=token_ids, time=time) if step in in_flight:
                replied, samples = in_flight.pop(step)
                replied.sampled = list(_sampled(samples, token_ids))
                replied.previous_reply_s, replied.reply_s = previous_reply_s, time
                if replied.arrival_s is None:  # otherwise the tokens were sent before the request arrived
                    replied.shape = replied.shape._replace(sent=num_sent)
                timings.steps.append(replied)
                previous_reply_s, num_sent = time, len(replied.sampled)
                for number in replied.sampled:
                    if number in names:
                        timings.replies.setdefault(names[number], []).append(time)
            case CacheReset():
                in_flight.clear()


def _check_times(entry: Entry) -> None:
    """Raise RecordingError for impossible times, which a valid checksum does not exclude."""
    for name in ("arrival_time", "now", "time"):
        if not abs(getattr(entry.record, name, 0.0)) <= MAX_NUMBER:
            rule = f"must have a `{name}` of at most {MAX_NUMBER:g} s"
            given = f"{getattr(entry.record, name):g}"
            raise RecordingError(f"record {entry.number} at byte {entry.offset} {rule}. Given: {given}")


def _sampled(samples: _Samples, token_ids: Sequence[int]) -> Iterator[int]:
    """Yield the request sequence of each token that the reply brought."""
    end = 0
    for number, num_samples, drafts in samples:
        start, end = end, end + num_samples
        yield from (number,) * count_accepted_tokens(drafts, token_ids[start:end])


def _shape(decided: Decided) -> StepShape:
    for row in decided.rows:
        if not all(0 <= each <= MAX_INTEGER for each in row[1:4]):
            rule = f"must have rows of numbers from 0 to {MAX_INTEGER}"
            raise RecordingError(f"step {decided.step} {rule}. Given: {row[1:4]}")
    rows = np.array([row[1:4] for row in decided.rows], np.int32).reshape(-1, 3)
    return shape_of_rows(rows[:, 1], rows[:, 0], int(rows[:, 2].sum()), len(decided.block_moves))
