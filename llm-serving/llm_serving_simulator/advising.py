"""A process of low priority that works out advice: a question on its standard input, the answer on its output.

    python -m llm_serving_simulator.advising

Its processor time and memory are bounded, and nothing waits for it but whoever asked.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
from llm_serving.admission.admission_control import RefusedRequests
from llm_serving.config import ServingConfig, load_config
from llm_serving.errors import LLMServingError, RecordingError

from llm_serving_simulator.advice import Advice, advise
from llm_serving_simulator.calibration import calibrate
from llm_serving_simulator.measured_steps import read_timings
from llm_serving_simulator.recorded_load import read_recorded_files

LOWEST: Final = 19
"""Niceness."""
MAX_BYTES: Final = 4 * 2**30
"""Of its address space."""
READING_S: Final = 30.0
"""Processor time beyond what it is given to play: for recordings, and to fit what steps take."""


class Question(msgspec.Struct):
    yaml: str
    """The configuration that holds, all of it."""
    sources: dict[str, str]
    """Where each of its values is written."""
    folder: str
    """Of the recording."""
    since: float
    """On the system's monotonic clock: who came before is left out."""
    budget_s: float
    """Seconds for all that is played."""
    refused: list[RefusedRequests] = []
    """Who was refused at the door since then: they are in no recording."""


class Refusal(msgspec.Struct):
    """In place of advice."""

    error: str


def answer(question: Question) -> Advice:
    """Raises LLMServingError where the recording or the configuration is of no use."""
    with tempfile.TemporaryDirectory(prefix="llm-serving-advice-") as folder:
        path = Path(folder) / "serving.yaml"
        path.write_text(question.yaml, encoding="utf-8")

        def configure(overrides: Sequence[str]) -> ServingConfig:
            return replace(load_config(path, overrides), sources=question.sources)

        files = _files(Path(question.folder), question.since)
        load = read_recorded_files(files, "the last minutes", question.since, question.refused)
        calibration = calibrate(read_timings(files), name="recorded", source="this server's recording")
        error = calibration.step.median_error
        return advise(configure, load, calibration.profile, error, question.budget_s)


def _files(folder: Path, since: float) -> list[Path]:
    """Those that were written since then."""
    oldest = time.time() - (time.monotonic() - since)
    files = [file for file in sorted(folder.glob("*.rec")) if file.stat().st_mtime >= oldest]
    if not files:
        raise RecordingError("nothing was recorded in that time")
    return files


def main() -> int:
    os.nice(LOWEST)
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    seconds = int(question.budget_s + READING_S)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    logging.disable(logging.CRITICAL)
    try:
        found: Advice | Refusal = answer(question)
    except LLMServingError as error:
        found = Refusal(str(error))
    except (OSError, MemoryError) as error:
        found = Refusal(f"the recording cannot be read: {error or 'it needs too much memory'}")
    sys.stdout.buffer.write(msgspec.json.encode(found))
    return int(isinstance(found, Refusal))


if __name__ == "__main__":
    sys.exit(main())
