"""Streams of every kind, the moments at which a WorkAgent can be killed, and tables of the answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from llm_serving.core.request import Request
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.sampling_params import BeamSearchParams
from llm_serving.engine.engine import Engine
from llm_serving.scheduler import Schedule
from support.engine_harness import bytes_of
from support.factories import create_request

MAX_ROUNDS = 3000
MOMENTS = (
    "waiting",
    "whole prompt",
    "first chunk",
    "later chunk",
    "decode",
    "swapping out",
    "swapped out",
    "swapping in",
    "preempted",
    "recomputed",
    "between steps",
)
"""What the lost step computes for a request, or why the request is not in the step."""


@dataclass
class Table:
    """Numbers of answers that equal the reference answers, by kind of stream and moment of the kill."""

    title: str
    columns: list[str] = field(default_factory=list)
    num_equal: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_kills: int = 0
    num_restarts: int = 0

    def add(self, stream: str, column: str, equal: bool) -> None:
        self.num_answers[stream, column] += 1
        self.num_equal[stream, column] += equal

    @property
    def all_equal(self) -> bool:
        return self.num_equal == self.num_answers

    def __str__(self) -> str:
        columns = [each for each in self.columns if any(column == each for _, column in self.num_answers)]
        lines = [f"**{self.title}**: {self.num_kills} kills, {self.num_restarts} restarts", ""]
        lines += [f"| stream | {' | '.join(columns)} |", f"| --- {'| ---: ' * len(columns)}|"]
        for stream in dict.fromkeys(stream for stream, _ in self.num_answers):
            cells = [(stream, column) for column in columns]
            texts = [
                f"{self.num_equal[cell]}/{self.num_answers[cell]}" if self.num_answers[cell] else "" for cell in cells
            ]
            lines.append(f"| {stream} | {' | '.join(texts)} |")
        total = f"{self.num_equal.total():,} of {self.num_answers.total():,} answers equal the reference answers"
        return "\n".join([*lines, "", total, ""])


def streams(max_tokens: int) -> dict[str, list[Request]]:
    """Return requests of every kind, which need more blocks than the caches of the tests have, so that all are
    preempted.
    """

    def ask(num_prompt: int, **options: Any) -> Request:
        return create_request(num_prompt, **{"max_tokens": max_tokens, "ignore_eos": True, **options})

    choices = [ask(11, temperature=0.9, seed=20 + choice) for choice in range(3)]
    for choice in choices[1:]:
        choice.fork_of = choices[0].request_id
    search = ask(9, logprobs=2)
    search.beam_search = BeamSearchParams(width=3, num_returned=3)
    vector = ask(33, max_tokens=0)
    vector.wants_vector = True
    return {
        "greedy": [ask(6)],
        "sampled": [ask(9, temperature=0.9, seed=11, priority=-1)],
        "penalties": [ask(7, temperature=0.7, seed=5, repetition_penalty=1.2, top_p=0.9)],
        "logprobs": [ask(5, logprobs=3)],
        "prompt logprobs": [ask(37, prompt_logprobs=2)],
        "vector": [vector],
        "n = 3": choices,
        "beams": [search],
        "chunked": [ask(40)],
        "prefix hit": [ask(45, priority=1)],
        "batch class": [ask(14, priority=1)],
        "interactive class": [ask(13, priority=-1)],
    }


LATE = {"prefix hit": "chunked", "interactive class": "greedy"}
"""Streams that are sent after the first token of another stream."""


def play(
    engine: Engine, asked: dict[str, list[Request]], kill: Callable[[], None], victims: Collection[int]
) -> dict[str, set[str]]:
    """Run the streams to their end, and kill the WorkAgent before the replies whose numbers are in `victims`.

    Returns:
        The moments at which each request, by id, was affected by a kill.
    """
    met: dict[str, set[str]] = {request.request_id: set() for requests in asked.values() for request in requests}
    moments: dict[int, dict[str, str]] = {}
    scheduler, executor = engine.scheduler, engine.executor
    schedule, collect = scheduler.schedule, executor.collect
    num_replies, due = 0, 0

    def schedule_and_record(now: float) -> Schedule | None:
        swapped = {each for each in scheduler._requests if scheduler.blocks.is_swapped(each)}
        decided = schedule(now)
        if decided is not None:
            moments[decided.step] = _moments(engine, decided, swapped)
        return decided

    def collect_or_kill() -> Any:
        nonlocal num_replies, due
        due += num_replies in victims
        num_replies += 1
        if due and engine._in_flight:  # otherwise an audit runs
            due -= 1
            for request_id, moment in moments[engine._in_flight[0].step].items():
                met[request_id].add(moment)
            kill()
        return collect()

    scheduler.schedule, executor.collect = schedule_and_record, collect_or_kill  # type: ignore[method-assign]
    try:
        late = dict(LATE)
        for name, requests in asked.items():
            if late.get(name) not in asked:
                _submit(engine, requests)
        for _ in range(MAX_ROUNDS):
            progressed = engine.step()
            for name, other in [each for each in late.items() if each[0] in asked and each[1] in asked]:
                if asked[other][0].output_token_ids:
                    del late[name]
                    _submit(engine, asked[name])
                    progressed = True
            if not progressed:
                return met
        raise AssertionError(f"the engine has not finished after {MAX_ROUNDS} rounds")
    finally:
        del scheduler.schedule, executor.collect  # type: ignore[method-assign]


def _submit(engine: Engine, requests: Sequence[Request]) -> None:
    for request in requests:
        engine.submit(request)


def _moments(engine: Engine, schedule: Schedule, swapped: Collection[str]) -> dict[str, str]:
    """Return the moment of each client request by id; a beam search has the moment of its first beam."""
    scheduler = engine.scheduler
    found: dict[str, str] = {}
    rows = {row.request.request_id: row for row in schedule.rows}
    swapping_out = {each.request_id for each in schedule.preemptions if each.swapped}
    for request_id, request in scheduler._requests.items():
        row = rows.get(request_id)
        if request_id in swapping_out:
            moment = "swapping out"
        elif row is None and scheduler.blocks.is_swapped(request_id):
            moment = "swapped out"
        elif row is None:
            moment = "between steps" if request in scheduler.running else "preempted" if request.has_run else "waiting"
        elif request_id in swapped:
            moment = "swapping in"
        elif row.query_len == 1 and row.end > request.num_prompt_tokens:
            moment = "decode"
        elif request.num_preemptions or request.num_output_tokens > row.num_samples:
            moment = "recomputed"
        elif row.num_computed > request.num_cached_tokens:
            moment = "later chunk"
        else:
            moment = "whole prompt" if row.num_samples else "first chunk"
        found.setdefault(request.root_request.request_id, moment)
    return found


def compare(
    table: Table,
    asked: dict[str, list[Request]],
    met: dict[str, set[str]],
    reference: dict[str, list[str]],
    answer: Callable[[str], RequestOutput],
) -> None:
    """Add each answer to the table at the moments at which a kill affected its request."""
    for stream, requests in asked.items():
        for request, expected in zip(requests, reference[stream], strict=True):
            equal = bytes_of(answer(request.request_id)) == expected
            for moment in met[request.request_id]:
                table.add(stream, moment, equal)
