"""An engine over a fake model, stepped by the test."""

from __future__ import annotations

from collections import defaultdict
from itertools import count

from llm_serving.core.request_output import RequestOutput, join_pieces
from llm_serving.core.sampling_params import MAX_LOGPROBS
from llm_serving.core.step import StepInput
from llm_serving.core.timings import Clock
from llm_serving.engine.engine import Engine
from llm_serving.executor.executor import LocalExecutor
from llm_serving.observability.event_log import EventLog
from llm_serving.observability.metrics import Metrics
from llm_serving.speculation import SpeculationController
from support.factories import create_scheduler
from support.fake_runner import FakeRunner
from support.word_tokenizer import WordTokenizer


class AheadExecutor(LocalExecutor):
    """A local executor that accepts a second step before the first is collected, as a WorkAgent does."""

    max_steps_in_flight = 2
    restarts_exhausted = False

    def submit(self, step: StepInput, announce_ending: bool = False) -> None:
        assert len(self._submitted) < 2
        super().submit(step, announce_ending)


class Harness:
    """An engine over a fake model, stepped by the test."""

    def __init__(
        self,
        *,
        ahead: bool = True,
        event_log: EventLog | None = None,
        clock: Clock | None = None,
        runner: type[FakeRunner] = FakeRunner,
        drafter: SpeculationController | None = None,
        **scheduler,
    ) -> None:
        self.scheduler = create_scheduler(**scheduler)
        blocks = self.scheduler.blocks
        self.runner = runner(
            *(blocks.pool.num_blocks, blocks.block_size, blocks.host_pool.num_blocks, blocks.groups),
            num_state_slots=0 if blocks.states is None else blocks.states.pool.num_blocks,
        )
        self.executor = (AheadExecutor if ahead else LocalExecutor)(self.runner)
        self.pieces: dict[str, list[RequestOutput]] = defaultdict(list)
        self.metrics = Metrics()
        ticks = count()
        self.engine = Engine(
            self.scheduler,
            self.executor,
            WordTokenizer(),
            self.metrics,
            self._publish,
            event_log=event_log,
            drafter=drafter,
            clock=clock or (lambda: float(next(ticks))),
        )

    def _publish(self, pieces: list[RequestOutput]) -> None:
        for piece in pieces:
            self.pieces[piece.request_id].append(piece)

    def run(self, max_steps: int = 3000) -> None:
        for _ in range(max_steps):
            progressed = self.engine.step()
            self.scheduler.check_integrity()
            if not progressed:
                return
        raise AssertionError("the engine does not come to an end")

    def token_ids(self, request_id: str) -> list[int]:
        return [token for piece in self.pieces[request_id] for token in piece.token_ids]

    def text(self, request_id: str) -> str:
        return "".join(piece.text for piece in self.pieces[request_id])

    def last(self, request_id: str) -> RequestOutput:
        assert self.pieces[request_id][-1].finished
        assert not any(piece.finished for piece in self.pieces[request_id][:-1])
        return self.pieces[request_id][-1]

    def answer(self, request_id: str) -> RequestOutput:
        return join_pieces(self.pieces[request_id])


def bytes_of(answer: RequestOutput) -> str:
    """Return a text of all fields of an answer, which differs wherever a bit differs."""
    parts = answer.beams or (answer,)
    ids_and_reason = [(part.text, part.token_ids, part.logprobs, part.finish_reason) for part in parts]
    scores = answer.prompt_logprobs
    of_prompt = None if scores is None else (scores.tokens(MAX_LOGPROBS), scores.ranks.tolist())
    return repr((ids_and_reason, of_prompt, None if answer.vector is None else answer.vector.tobytes()))
