"""Workloads from recordings of the scheduler: which requests arrived when, and what the model answered."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Final

from llm_serving.admission.admission_control import RefusedRequests
from llm_serving.config.schema import ServingConfig
from llm_serving.core.request import Request
from llm_serving.errors import ConfigError, RecordingError
from llm_serving.recording.records import Reader
from llm_serving.recording.replay import Replay

from llm_serving_simulator.files import MAX_INTEGER
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
