"""One line of JSON a request: who, what, how long and how much, never a text."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Final

import msgspec

from llm_serving.config.sections.server import ServerConfig
from llm_serving.core.request_output import RequestOutput
from llm_serving.errors import ConfigError
from llm_serving.log import get_logger
from llm_serving.log_writer import LogWriter, RotatingFile
from llm_serving.server.line_budget import LineBudget
from llm_serving.server.note import Note

logger = get_logger(__name__)

STANDARD_OUTPUT: Final = Path("-")
REFUSED_BURST, REFUSED_PER_SECOND = 200, 20.0
"""Lines of refusals (4xx, 503): a flood of them must not push the others out of the files."""

_encode: Final = msgspec.json.Encoder().encode


class AccessLine(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A line; what does not apply is left out. Times are milliseconds from the request's headers, unless stated."""

    time: str
    """When the answer ended, in UTC."""
    client: str
    method: str
    route: str
    status: int
    total_ms: float
    """To the end of the answer."""
    id: str | None = None
    """What `/v1/requests/{id}/explain` takes."""
    tenant: str | None = None
    request_class: str | None = msgspec.field(default=None, name="class")
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache."""
    output_tokens: int | None = None
    """Generated, of all choices."""
    finish: str | None = None
    """Why the answer ended; several reasons with a comma between them; `abort`: the client left."""
    queue_ms: float | None = None
    """From arrival at the engine to being scheduled for the first time."""
    ttft_ms: float | None = None
    """To the first token."""
    error: str | None = None
    suppressed: int | None = None
    """Lines of refusals that were left out since the one before."""


class AccessLog:
    """Writes a line for every request; of refusals at most so many a second.

    Args:
        put: Takes a line; must not wait.
        wall_clock: The time of day.
        reopen: Has further lines go to a file that is opened anew.
    """

    def __init__(
        self,
        put: Callable[[str], None],
        wall_clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        reopen: Callable[[], None] = lambda: None,
    ) -> None:
        self._put = put
        self.reopen = reopen
        self._wall_clock = wall_clock
        self._refusals = LineBudget(REFUSED_BURST, REFUSED_PER_SECOND)

    def write(self, note: Note, status: int, now: float) -> None:
        """Writes the line of a request that was answered with `status` at `now`, on the engine's clock."""
        suppressed: int | None = 0
        if 400 <= status < 499 or status == HTTPStatus.SERVICE_UNAVAILABLE:
            suppressed = self._refusals.take(now)
            if suppressed is None:
                return
        began = note.exchange.received_time
        line = AccessLine(
            time=self._wall_clock().isoformat(timespec="milliseconds"),
            client=note.client,
            method=note.method,
            route=note.route,
            status=status,
            total_ms=_ms(now - began),
            id=note.request_id or None,
            tenant=note.tenant or None,
            request_class=note.request_class or None,
            error=note.error or None,
            suppressed=suppressed or None,
        )
        if note.outputs is not None:
            _add_usage(line, note, note.outputs)
            first = note.exchange.first_token_time
            line.ttft_ms = None if first is None else _ms(first - began)
        self._put(_encode(line).decode())


def open_access_log(serving: ServerConfig) -> tuple[AccessLog | None, Callable[[], None]]:
    """The access log of a configuration, if it has one, and what closes it.

    Raises:
        ConfigError: The file cannot be opened.
    """
    path = serving.access_log
    if path is None:
        return None, lambda: None
    handler: logging.Handler
    if path == STANDARD_OUTPUT:
        handler = _StandardOutput(sys.stdout)
    else:
        try:
            handler = RotatingFile(path, serving.log_file_bytes, serving.log_files)
        except OSError as error:
            rule = f"cannot be written: {error.strerror or error}"
            raise ConfigError(f"serving_config.access_log: {path} {rule}") from None
    writer = LogWriter(handler, lambda text: logger.error("serving_config.access_log: %s %s", path, text))
    return AccessLog(writer.put, reopen=writer.reopen), writer.close


class _StandardOutput(logging.StreamHandler):  # type: ignore[type-arg]
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        raise


def _add_usage(line: AccessLine, note: Note, outputs: Sequence[RequestOutput | None]) -> None:
    known = [output for output in outputs if output is not None]
    line.prompt_tokens = note.num_prompt_tokens
    line.cached_tokens = sum(output.num_cached_tokens for output in outputs[:: note.streams_per_prompt] if output)
    line.output_tokens = sum(output.num_output_tokens for output in known)
    reasons = {"abort" if output is None else output.finish_reason or "abort" for output in outputs}
    line.finish = ",".join(sorted(reasons))
    if known:
        line.queue_ms = _ms(known[0].queued_s)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
