"""What steps took, as recordings of the scheduler tell it."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from llm_serving.errors import ConfigError, RecordingError
from llm_serving.recording.records import Added, Asked, CacheLost, Decided, Drafted, Entry, Reader, Updated
from llm_serving.recording.replay import Replay
from llm_serving.scheduler.scheduler import Scheduler
from llm_serving.scheduler.step_results import num_chosen

from llm_serving_simulator.document import MOST, MOST_WHOLE
from llm_serving_simulator.recorded_load import torn
from llm_serving_simulator.step_shape import StepShape, shape_of_rows

LONG_STEP_S: Final = 0.02
"""Behind a step that takes longer the master waits for the announcement of the next one's end, if that is under way."""


@dataclass(slots=True)
class MeasuredStep:
    """Seconds are those of the clock of the master."""

    shape: StepShape
    asked_s: float
    """When the scheduler was asked for it."""
    came_s: float | None
    """When the request came for which it was formed, of a step formed for one while nothing was computed."""
    before_s: float
    """When the step before had been replied to; before all, minus infinity."""
    replied_s: float = 0.0
    goes_on_s: float | None = None
    """When the scheduler was asked for a step after the reply, if that was at once."""
    chosen: list[int] = field(default_factory=list)
    """Requests, by `Request.sequence`, once for each token that the reply brought them."""

    @property
    def ahead(self) -> bool:
        """Whether it was there when the WorkAgent was done with the one before."""
        return self.asked_s < self.before_s

    @property
    def began_s(self) -> float:
        """When it could begin; of one that was not there ahead, when forming it could."""
        return max(self.asked_s, self.before_s)

    @property
    def seconds(self) -> float:
        """From when it could begin to its reply; of one that was not there ahead, forming and sending it included."""
        return self.replied_s - self.began_s


@dataclass
class Timings:
    """Of one recording, or of several."""

    steps: list[MeasuredStep] = field(default_factory=list)
    arrivals: dict[str, float] = field(default_factory=dict)
    """By the id of a request: when it was at the door."""
    num_blocks: int | None = None
    """Of the cache."""
    block_size: int | None = None
    """Tokens of each of them."""
    replies: dict[str, list[float]] = field(default_factory=dict)
    """By the id of a request: when the reply with each of its tokens came."""
    notices: list[str] = field(default_factory=list)
    """What a person should know of the recordings."""


def read_timings(files: Iterable[Path]) -> Timings:
    """Reads what recordings keep of times; nothing is decided again.

    Raises:
        ConfigError: A file cannot be read.
        RecordingError: One is damaged, or of another version.
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
                timings.notices += torn(file, reader.torn_at)
        except RecordingError as error:
            raise RecordingError(f"{file}: {error}") from None
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}") from None
    _note_requests(timings)
    return timings


def _note_requests(timings: Timings) -> None:
    """Gives each step the requests that came while it was computed."""
    times = sorted(timings.arrivals.values())
    for step in timings.steps:
        read = bisect(times, step.replied_s) - bisect(times, step.began_s)
        step.shape = step.shape._replace(read=read)


def _read(entries: Iterator[Entry], timings: Timings, before: Scheduler) -> None:
    """`before`: the scheduler as it was before these entries."""
    in_flight: dict[int, tuple[MeasuredStep, _Chosen]] = {}
    names = {each.sequence: each.request_id for each in before._requests.values()}
    drafts: dict[int, list[int]] = {}
    sequence = before.waits.num_entered
    before_s, came_s, asked_s, before_took_s = float("-inf"), None, 0.0, 0.0
    replied: MeasuredStep | None = None
    num_sent = 0
    for entry in entries:
        _check_times(entry)
        match entry.record:
            case Added(request_id=name, arrival_time=time):
                names[sequence] = name
                sequence += 1
                timings.arrivals[name] = time
                came_s = time if came_s is None else came_s
            case Drafted():
                drafts[entry.record.sequence] = entry.record.token_ids
            case Asked(now=now):
                asked_s = now
                if replied is not None:
                    is_short = max(replied.seconds, before_took_s) < LONG_STEP_S
                    if is_short if in_flight else came_s is None:
                        replied.goes_on_s = now
                    before_took_s, replied = replied.seconds, None
            case Decided(step=int(step)) as decided:
                alone = not in_flight and came_s is not None and came_s > before_s
                chosen = [(row[0], row[3], drafts.pop(row[0], [])[: row[3] - 1]) for row in decided.rows if row[3]]
                measured = MeasuredStep(_shape(decided), asked_s, came_s if alone else None, before_s)
                in_flight[step] = measured, chosen
                came_s = None
            case Updated(step=step, token_ids=token_ids, time=time) if step in in_flight:
                replied, chosen = in_flight.pop(step)
                replied.chosen = list(_brought(chosen, token_ids))
                replied.before_s, replied.replied_s = before_s, time
                if replied.came_s is None:  # otherwise they were sent before it came
                    replied.shape = replied.shape._replace(sent=num_sent)
                timings.steps.append(replied)
                before_s, num_sent = time, len(replied.chosen)
                for number in replied.chosen:
                    if number in names:
                        timings.replies.setdefault(names[number], []).append(time)
            case CacheLost():
                in_flight.clear()


def _check_times(entry: Entry) -> None:
    """Raises RecordingError for what a seal cannot tell: a file that was written with it."""
    for name in ("arrival_time", "now", "time"):
        if not abs(getattr(entry.record, name, 0.0)) <= MOST:
            rule = f"must have a `{name}` of at most {MOST:g} s"
            given = f"{getattr(entry.record, name):g}"
            raise RecordingError(f"record {entry.number} at byte {entry.offset} {rule}. Given: {given}")


_Chosen = list[tuple[int, int, list[int]]]
"""Of each row that chooses tokens: its request, how many are chosen, and its draft tokens."""


def _brought(chosen: _Chosen, token_ids: Sequence[int]) -> Iterator[int]:
    """The requests of a reply, each once for each token that it gets."""
    end = 0
    for number, num_samples, drafts in chosen:
        start, end = end, end + num_samples
        yield from (number,) * num_chosen(drafts, token_ids[start:end])


def _shape(decided: Decided) -> StepShape:
    for row in decided.rows:
        if not all(0 <= each <= MOST_WHOLE for each in row[1:4]):
            rule = f"must have rows of numbers from 0 to {MOST_WHOLE}"
            raise RecordingError(f"step {decided.step} {rule}. Given: {row[1:4]}")
    rows = np.array([row[1:4] for row in decided.rows], np.int32).reshape(-1, 3)
    return shape_of_rows(rows[:, 1], rows[:, 0], int(rows[:, 2].sum()), len(decided.block_moves))
