"""Audits: compute finished requests again with batch size 1, and compare the answers bit for bit."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

from llm_serving.core.request import FinishReason, Request
from llm_serving.core.request_class import MAX_PRIORITY
from llm_serving.core.request_output import RequestOutput, join_pieces
from llm_serving.core.sampling_params import MAX_LOGPROBS
from llm_serving.core.timings import Clock
from llm_serving.engine.output_processor import OutputProcessor
from llm_serving.engine.sinks import SinkContext, attach_sink
from llm_serving.log import get_logger
from llm_serving.observability.event_log import EventLog
from llm_serving.observability.metrics import Metrics
from llm_serving.scheduler import Scheduler
from llm_serving.text.tokenizer.tokenizer import Tokenizer

logger = get_logger(__name__)

MAX_WAITING: Final = 16
"""Maximum number of answers that wait for their audit. If more wait, the oldest is dropped."""
MAX_BYTES: Final = 2**24
"""Maximum bytes of an audited answer."""
TENANT: Final = "(audits)"
"""Tenant of the requests that audits add. No API key can have this name."""
AUDITED_REASONS: Final = frozenset({FinishReason.STOP, FinishReason.LENGTH})


@dataclass(slots=True)
class Answer:
    request: Request
    pieces: list[RequestOutput] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, piece: RequestOutput) -> None:
        self.pieces.append(piece)
        self.num_bytes += piece.num_bytes

    def fields(self) -> list[str]:
        """Return the answer as a list of texts. Two lists are equal exactly if the answers are bit-identical."""
        whole = join_pieces(self.pieces)
        parts = whole.beams or (whole,)
        found = [repr(each) for part in parts for each in part.logprobs or part.token_ids]
        if whole.vector is not None:
            found = [f"vector {crc32(whole.vector.tobytes()):08x}", *found]
        if (of_prompt := whole.prompt_logprobs) is not None:
            pairs = zip(of_prompt.tokens(MAX_LOGPROBS), of_prompt.ranks.tolist(), strict=True)
            found = [repr(each) for each in pairs] + found
        return [*found, repr([(crc32(part.text.encode()), part.finish_reason, part.stop_reason) for part in parts])]


class Auditor:
    """Audits one of every `every` requests, or no request if `every` is 0.

    A copy of the request runs alone on an idle engine, and both answers must be equal. Answers are batch-invariant, so
    any difference is a bug; the metric `audit_mismatch_total` counts the differences. The copy has its own cache salt,
    so it reuses no cached blocks. It has the lowest priority and its own tenant, so it delays no client.
    """

    def __init__(self, every: int, scheduler: Scheduler, tokenizer: Tokenizer, metrics: Metrics, clock: Clock) -> None:
        self.watched: dict[str, Answer] = {}
        self.waiting: deque[Answer] = deque(maxlen=MAX_WAITING)
        self.every = every
        self._metrics = metrics
        processor = OutputProcessor(tokenizer, None, EventLog(), clock)
        self._context = SinkContext(scheduler, processor, self._add_copy_output)
        self._running: tuple[Answer, Answer] | None = None

    def start(self, request: Request) -> None:
        self.watched[request.request_id] = Answer(request)

    def resume(self, request: Request, answer: Answer | None) -> None:
        if answer is not None:
            answer.request = request
            self.watched[request.request_id] = answer

    def record(self, pieces: list[RequestOutput]) -> None:
        for piece in pieces:
            answer = self.watched.get(piece.request_id)
            if answer is None:
                continue
            answer.add(piece)
            if piece.finished or answer.num_bytes > MAX_BYTES:
                del self.watched[piece.request_id]
            if piece.finish_reason in AUDITED_REASONS and answer.num_bytes <= MAX_BYTES:
                self.waiting.append(answer)

    def run_copy(self) -> None:
        """Recompute the oldest answer that waits for an audit, unless an audit runs. The engine must be idle."""
        if self._running is not None or not self.waiting:
            return
        answer = self.waiting.popleft()
        request = answer.request
        copy = Request.derived(
            request,
            request_id=f"audit-{request.request_id}",
            priority=MAX_PRIORITY,
            tenant=TENANT,
            cache_salt=request.request_id,
            wants_vector=answer.pieces[-1].vector is not None,
        )
        self._running = answer, Answer(copy)
        attach_sink(copy, self._context)

    def cancel_copy(self) -> None:
        if self._running is not None:
            sink = self._running[1].request.sink
            assert sink is not None
            sink.finish(FinishReason.ABORT)

    def forget_adapter(self, number: int) -> None:
        kept = [each for each in self.waiting if each.request.adapter != number]
        self.waiting = deque(kept, MAX_WAITING)
        if self._running is not None and self._running[0].request.adapter == number:
            self.cancel_copy()

    def _add_copy_output(self, piece: RequestOutput) -> None:
        assert self._running is not None
        answer, copy = self._running
        copy.add(piece)
        if piece.finished:
            self._running = None
            if piece.finish_reason in AUDITED_REASONS:
                self._compare(answer, copy)

    def _compare(self, answer: Answer, copy: Answer) -> None:
        given, alone = answer.fields(), copy.fields()
        self._metrics.record_audit(differs=given != alone)
        if given == alone:
            return
        index = next(index for index, pair in enumerate(zip(given, alone, strict=False)) if pair[0] != pair[1])
        logger.error(
            "audit: token %d of request %s differs: the client got %s, but the request computed alone gives %s",
            index,
            answer.request.request_id,
            given[index],
            alone[index],
        )
