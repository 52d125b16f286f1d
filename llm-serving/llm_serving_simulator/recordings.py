"""What recordings of the scheduler hold: workloads (which requests arrived when, and their answers), and step times."""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
from llm_serving.admission.admission_control import RefusedRequests
from llm_serving.config.schema import ServingConfig
from llm_serving.core.request import Request
from llm_serving.errors import ConfigError, RecordingError
from llm_serving.recording.records import Added, CacheReset, Decided, Drafted, ScheduleCalled, Updated
from llm_serving.scheduler.schedule import count_accepted_tokens
from llm_serving.scheduler.scheduler import Scheduler
from llm_serving_tools.recordings.reader import Entry, Reader
from llm_serving_tools.recordings.replay import Replay

from llm_serving_simulator.files import MAX_INTEGER, MAX_NUMBER
from llm_serving_simulator.profile import StepShape, shape_of_rows
from llm_serving_simulator.workload import FIRST_TOKEN, Workload, WorkloadRequest, WorkloadStream, read_workload

YAML_SUFFIXES: Final = (".yaml", ".yml")
REFUSED: Final = "refused"
"""Name of the stream of requests that admission control refused."""
FAILED: Final = -1
"""Placeholder of a token that could not be sampled."""
AUDIT_PREFIX: Final = "audit-"
"""Prefix of the ids of requests that audits send."""


def load_workload(path: Path, seed: int | None = None) -> Workload:
    """Read a workload file (*.yaml) or a recording (*.rec, or a folder of recordings).

    Args:
        path: The file or folder.
        seed: Replaces the seed of a workload file.

    Raises:
        ConfigError: The file breaks a rule; the text has file, line and rule.
        RecordingError: A recording is damaged.
    """
    if path.suffix in YAML_SUFFIXES:
        return read_workload(path, seed)
    if path.suffix == ".rec" or path.is_dir():
        if seed is not None:
            raise ConfigError(f"--load-seed needs a workload (*.yaml): {path} is a recording. Given: {seed}")
        return read_recorded(path)
    raise ConfigError(f"{path}: must be a workload (*.yaml), or a recording (*.rec, or a folder of them)")


def check_vocabulary(path: Path, workload: Workload, config: ServingConfig) -> None:
    """Raise ConfigError if a recording contains a token id that the configured model does not have."""
    num_tokens = config.model.vocab_size
    if path.suffix not in YAML_SUFFIXES and num_tokens is not None and workload.vocab_size > num_tokens:
        rule = f"must be a recording of the model that is simulated, which has {num_tokens} tokens"
        given = f"token {workload.vocab_size - 1}"
        raise ConfigError(f"{path}: {rule}; `--model none` simulates without one. Given: {given}")


def recording_files(path: Path) -> list[Path]:
    """Return the recording itself, or those of a folder, ordered by name.

    Raises:
        ConfigError: There is no recording.
    """
    files = sorted(path.glob("*.rec")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ConfigError(f"{path}: must be a recording (*.rec) or a folder of them")
    return files


def read_recorded(path: Path) -> Workload:
    """Read all recordings of a path; see `read_recorded_files`."""
    return read_recorded_files(recording_files(path), path.stem)


def read_recorded_files(
    files: Sequence[Path], name: str, since: float = -math.inf, refused: Sequence[RefusedRequests] = ()
) -> Workload:
    """Read the requests of recordings by replaying them.

    A request that is unfinished at the end of the recording keeps the tokens that it has. The answer length of a
    request without any token is drawn from other requests. Audit requests, and beams of a search except the first, are
    left out, because the simulation produces its own.

    Args:
        files: The recordings, in order.
        name: Name of the workload.
        since: Leave out requests that arrived before this time of the recording's clock.
        refused: Requests that admission control refused; their answer lengths are drawn from other requests.

    Raises:
        ConfigError: A file is missing.
        RecordingError: A file is damaged, has another version, or does not replay to the same decisions.
    """
    requests: list[Request] = []
    notices: list[str] = []
    for file in files:
        try:
            with file.open("rb") as stream:
                reader = Reader(stream)
                replay = Replay(reader)
                requests += replay.requests
                replay.on_request = requests.append
                replay.run()
            notices += torn_notice(file, reader.torn_at)
        except RecordingError as error:
            raise RecordingError(f"{file}: {error}") from None
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}") from None
    recent = [each for each in _unique(requests).values() if each.arrival_time >= since]
    return replace(_workload(name, files, recent, refused), notices=tuple(notices))


def torn_notice(file: Path, position: int | None) -> list[str]:
    """Return a notice for a recording whose last record is incomplete from `position` on; nothing for None."""
    return [] if position is None else [f"{file}: ends within a record, at byte {position}; what is before it is used"]


def _unique(requests: Iterable[Request]) -> dict[str, Request]:
    """Return requests by id. If several files or replicas have one, the copy with the most output tokens counts."""
    found: dict[str, Request] = {}
    for each in requests:
        if not each.is_beam and not each.request_id.startswith(AUDIT_PREFIX):
            known = found.setdefault(each.request_id, each)
            if len(each.output_token_ids) > len(known.output_token_ids):
                found[each.request_id] = each
    return found


def _workload(
    name: str, files: Sequence[Path], requests: Sequence[Request], refused: Sequence[RefusedRequests]
) -> Workload:
    where = str(files[0]) if len(files) == 1 else name
    if not requests:
        only_refused = f" but the {len(refused)} that admission control refused" if refused else ""
        raise RecordingError(f"{where} has no requests{only_refused}; a load must have at least one")
    for each in requests:
        _check(each, where)
    ordered = sorted(requests, key=lambda each: each.arrival_time)
    origin = ordered[0].arrival_time
    found = [
        WorkloadRequest(
            stream="recorded",
            due_s=each.arrival_time - origin,
            prompt_token_ids=each.prompt_token_ids,
            num_output_tokens=max(1, len(each.output_token_ids)),
            max_tokens=max(1, each.sampling.max_tokens),
            priority=each.priority,
            tenant=each.tenant,
            timeout_s=None if each.deadline is None else each.deadline - each.arrival_time,
            cache_salt=each.cache_salt,
            answer_token_ids=each.output_token_ids,
        )
        for each in ordered
    ]
    unanswered = [not (each.output_token_ids or each.has_prompt_results) for each in ordered]
    found = list(_with_lengths(found, unanswered))
    found = sorted([*found, *_refused(refused, origin, found)], key=lambda each: each.due_s)
    if first := min(0.0, found[0].due_s):
        found = [replace(each, due_s=each.due_s - first) for each in found]
    largest = max(max(chain(each.prompt_token_ids, each.output_token_ids)) for each in ordered)
    return Workload(name, (WorkloadStream("recorded", found),), vocab_size=max(16, largest + 1))


def _check(request: Request, where: str) -> None:
    """Raise RecordingError for impossible values, which a valid checksum does not exclude."""
    if not math.isfinite(request.arrival_time):
        given = f"{request.arrival_time:g}"
        raise RecordingError(f"{where}: request {request.request_id!r} must come at a finite time. Given: {given}")
    for bound in (min(request.prompt_token_ids), max(request.prompt_token_ids)):
        if not 0 <= bound <= MAX_INTEGER:
            rule = f"must have token ids from 0 to {MAX_INTEGER}"
            raise RecordingError(f"{where}: request {request.request_id!r} {rule}. Given: {bound}")
    for token_id in request.output_token_ids:
        if not FAILED <= token_id < MAX_INTEGER:
            rule = f"must have an answer of token ids from {FAILED} to {MAX_INTEGER - 1}"
            raise RecordingError(f"{where}: request {request.request_id!r} {rule}. Given: {token_id}")


def _with_lengths(requests: Sequence[WorkloadRequest], unanswered: Sequence[bool]) -> Iterator[WorkloadRequest]:
    """Give each unanswered request the answer length of a random answered one, at most its `max_tokens`."""
    rng = random.Random(len(requests))
    answered = [each for each, is_unanswered in zip(requests, unanswered, strict=True) if not is_unanswered]
    for each, is_unanswered in zip(requests, unanswered, strict=True):
        if is_unanswered and answered:
            num_output = rng.choice(answered).num_output_tokens
            yield replace(each, num_output_tokens=min(num_output, each.max_tokens))
        else:
            yield each


def _refused(
    refused: Sequence[RefusedRequests], origin: float, answered: Sequence[WorkloadRequest]
) -> Iterator[WorkloadRequest]:
    """Yield the refused requests, each with a random prompt and the answer length of a random other request."""
    rng = random.Random(len(refused))
    for each in refused:
        for length in each.prompt_lens:
            yield replace(
                rng.choice(answered),
                stream=REFUSED,
                due_s=each.time - origin,
                prompt_token_ids=rng.choices(range(FIRST_TOKEN, 16), k=max(1, length)),
                priority=each.priority,
                tenant=each.tenant,
                cache_salt="",
                answer_token_ids=(),
            )


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
"""The rows that sample tokens; for each one its request sequence, number of samples and draft tokens to verify."""


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
