"""Recordings in memory: a recorded scheduler, and helpers for replaying its files."""

from __future__ import annotations

import io
import itertools
from typing import Any

from llm_serving.core.timings import Clock, monotonic
from llm_serving.recording.recorder import RecordedScheduler, Recorder
from llm_serving.recording.records import MAGIC, Chain, encode
from llm_serving_tools.recordings.reader import Entry, Reader
from llm_serving_tools.recordings.replay import Replay
from support.factories import create_request, create_scheduler


class MemoryFiles:
    """A sink that keeps the bytes of files."""

    def __init__(self) -> None:
        self.is_open = True
        self.files: list[bytes] = []

    def begin(self, data: bytes) -> None:
        self.files.append(data)

    def append(self, data: bytes) -> None:
        self.files[-1] += data

    def close(self) -> bool:
        self.is_open = False
        return True


def create_recorded(
    files: MemoryFiles, max_file_bytes: int = 2**24, clock: Clock = monotonic, **options: Any
) -> RecordedScheduler:
    plain = create_scheduler(**options)
    recorder = Recorder(files, "scheduler", max_file_bytes, clock)
    return RecordedScheduler(plain._components.rules, plain.blocks, recorder)


def record_steps(num_tokens: int) -> bytes:
    """Run a request `a` with an answer of `num_tokens`; steps take 10 ms and are scheduled one ahead."""
    files, times = MemoryFiles(), itertools.count(1)
    scheduler = create_recorded(files, clock=lambda: 0.01 * next(times))
    scheduler.add(create_request(4, request_id="a", max_tokens=num_tokens))
    before = None
    while (step := scheduler.schedule(0.0)) is not None or before is not None:
        if before is not None:
            scheduler.update(before, [7] * before.num_samples)
        before = step
    return files.files[0]


def read(data: bytes) -> list[Entry]:
    """Return the records of a file after its header."""
    return list(Reader(io.BytesIO(data)))


def replay(data: bytes, until: int | None = None, *, explain: bool = False) -> Replay:
    result = Replay(Reader(io.BytesIO(data)))
    result.run(until, explain=explain)
    return result


def seal(data: bytes) -> str:
    """Return the end of a file."""
    return data[-8:].hex()


def with_record(data: bytes, number: int, record: Any) -> bytes:
    """Return the file with one record after the header replaced, and all checksums computed again."""
    reader = Reader(io.BytesIO(data))
    chain = Chain()
    frames = [chain.frame(reader.header_payload)]
    frames += [chain.frame(encode(record) if each.number == number else each.payload) for each in reader]
    return MAGIC + b"".join(frames)
