"""Where answers are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llm_serving.core.request import Request
from llm_serving.core.request_output import RequestOutput
from llm_serving.engine.output_processor import OutputProcessor
from llm_serving.scheduler import Scheduler


def _nobody_notes(request: Request) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Desk:
    """What receivers share: those who compute, those who make text of tokens, those who are told."""

    scheduler: Scheduler
    processor: OutputProcessor
    tell: Callable[[RequestOutput], None]
    """Gets every piece of every answer."""
    note_length: Callable[[Request], None] = _nobody_notes
    """Told of a sequence that has come to its end, for those who predict how long others will be."""
