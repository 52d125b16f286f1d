"""A load as a recording of the scheduler has it: who came when, with what, and what came of it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Final

from llm_serving.admission.admission_control import RefusedRequests
from llm_serving.core.request import Request
from llm_serving.errors import ConfigError, RecordingError
from llm_serving.recording.records import Reader
from llm_serving.recording.replay import Replay

from llm_serving_simulator.document import MOST_WHOLE
from llm_serving_simulator.load import Asked, Load, Stream

REFUSED: Final = "refused"
"""The stream of those who were refused at the door."""
FAILED: Final = -1
"""In place of a token that could not be chosen."""
AUDIT_PREFIX: Final = "audit-"
"""Of the ids of copies that audits compute."""


def recording_files(path: Path) -> list[Path]:
    """The file, or those of a folder in the order of their names.

    Raises:
        ConfigError: There are none.
    """
    files = sorted(path.glob("*.rec")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ConfigError(f"{path}: must be a recording (*.rec) or a folder of them")
    return files


def read_recorded(path: Path) -> Load:
    """As `read_recorded_files`, of all files of a path."""
    return read_recorded_files(recording_files(path), path.stem)


def read_recorded_files(
    files: Sequence[Path], name: str, since: float = -math.inf, refused: Sequence[RefusedRequests] = ()
) -> Load:
    """Reads what was asked during a recording, by replaying it.

    A request whose end is not in the recording is taken to end where the recording does; what one would have got that
    got nothing, as it waited until it was given up or the recording ended, is drawn from what others got. Copies that
    audits compute, and the beams of searches beyond the first, are left out: the simulation has its own.

    Args:
        files: In their order.
        name: Of the load.
        since: On the clock of the recording; who came before is left out.
        refused: Who came as well and was refused at the door; what they would have got is drawn from what others got.

    Raises:
        ConfigError: There is no such file.
        RecordingError: One is damaged, of another version, or is not decided again as it was.
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
            notices += torn(file, reader.torn_at)
        except RecordingError as error:
            raise RecordingError(f"{file}: {error}") from None
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}") from None
    asked = [each for each in _once(requests).values() if each.arrival_time >= since]
    return replace(_load(name, files, asked, refused), notices=tuple(notices))


def torn(file: Path, at: int | None) -> list[str]:
    """What to tell of a recording whose last record is not complete from that byte on; None: it is."""
    return [] if at is None else [f"{file}: ends within a record, at byte {at}; what is before it is used"]


def _once(requests: Iterable[Request]) -> dict[str, Request]:
    """By id; of one that lived in several files, or at several replicas, as it is where it got farthest."""
    found: dict[str, Request] = {}
    for each in requests:
        if not each.is_beam and not each.request_id.startswith(AUDIT_PREFIX):
            known = found.setdefault(each.request_id, each)
            if len(each.output_token_ids) > len(known.output_token_ids):
                found[each.request_id] = each
    return found


def _load(name: str, files: Sequence[Path], requests: Sequence[Request], refused: Sequence[RefusedRequests]) -> Load:
    where = str(files[0]) if len(files) == 1 else name
    if not requests:
        of_refused = f" but the {len(refused)} that were refused at the door" if refused else ""
        raise RecordingError(f"{where} has no requests{of_refused}; a load must have at least one")
    for each in requests:
        _check(each, where)
    ordered = sorted(requests, key=lambda each: each.arrival_time)
    origin = ordered[0].arrival_time
    asked = [
        Asked(
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
    asked = list(_with_answers(asked, [not (each.output_token_ids or each.tells_of_its_prompt) for each in ordered]))
    asked = sorted([*asked, *_refused(refused, origin, asked)], key=lambda each: each.due_s)
    if first := min(0.0, asked[0].due_s):
        asked = [replace(each, due_s=each.due_s - first) for each in asked]
    largest = max(max(chain(each.prompt_token_ids, each.output_token_ids)) for each in ordered)
    return Load(name, (Stream("recorded", asked),), vocab_size=max(16, largest + 1))


def _check(request: Request, where: str) -> None:
    """Raises RecordingError for what a seal cannot tell: a file that was written with it."""
    if not math.isfinite(request.arrival_time):
        given = f"{request.arrival_time:g}"
        raise RecordingError(f"{where}: request {request.request_id!r} must come at a finite time. Given: {given}")
    for bound in (min(request.prompt_token_ids), max(request.prompt_token_ids)):
        if not 0 <= bound <= MOST_WHOLE:
            rule = f"must have token ids from 0 to {MOST_WHOLE}"
            raise RecordingError(f"{where}: request {request.request_id!r} {rule}. Given: {bound}")
    for token_id in request.output_token_ids:
        if not FAILED <= token_id < MOST_WHOLE:
            rule = f"must have an answer of token ids from {FAILED} to {MOST_WHOLE - 1}"
            raise RecordingError(f"{where}: request {request.request_id!r} {rule}. Given: {token_id}")


def _with_answers(asked: Sequence[Asked], got_nothing: Sequence[bool]) -> Iterator[Asked]:
    """Those who got nothing with the answers of others who got some, as far as each asked for so much."""
    rng = random.Random(len(asked))
    answered = [each for each, nothing in zip(asked, got_nothing, strict=True) if not nothing]
    for each, nothing in zip(asked, got_nothing, strict=True):
        if nothing and answered:
            num_output = rng.choice(answered).num_output_tokens
            yield replace(each, num_output_tokens=min(num_output, each.max_tokens))
        else:
            yield each


def _refused(refused: Sequence[RefusedRequests], origin: float, others: Sequence[Asked]) -> Iterator[Asked]:
    """As they would have been asked: each with the answer of somebody who was let in, and a prompt of its own."""
    rng = random.Random(len(refused))
    for each in refused:
        for length in each.prompt_lens:
            like = rng.choice(others)
            yield replace(
                like,
                stream=REFUSED,
                due_s=each.time - origin,
                prompt_token_ids=rng.choices(range(3, 16), k=max(1, length)),
                priority=each.priority,
                tenant=each.tenant,
                cache_salt="",
                answer_token_ids=(),
            )
