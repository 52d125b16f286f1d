"""A client of the simulation: its request, its reference answer, and when it leaves."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import cached_property

from llm_serving.core.request import FinishReason, Request, RequestStatus
from llm_serving.core.request_class import MAX_PRIORITY
from llm_serving.core.request_output import RequestOutput, TokenLogprobs, join_pieces
from llm_serving.core.sampling_params import BeamSearchParams, SamplingParams
from llm_serving.core.window import NO_WINDOW
from llm_serving.engine.engine import Engine
from llm_serving.engine.request_stream import RequestStream
from support.expected_beams import expected_beams
from support.fake_runner import POISON_LOGPROB, expected_output, most_likely, next_logprobs, seen, vector_of
from support.simulated_agent import POISON
from support.word_tokenizer import WordTokenizer

MAX_MODEL_LEN = 48
NEVER_GENERATED = ((POISON, POISON),)
"""Bad words, which make a request wait for the result of every step."""
ARRIVING, RESTARTING, ANYWHERE = "in the inbox", "during a restart", "anywhere"
STATES = (
    *(ARRIVING, "waiting", "waiting for its parent", "preempted", "swapped", "lost", RESTARTING),
    *("in prefill", "in flight", "between two steps", "beam search", "ended"),
)
"""States in which a client may leave."""


@dataclass(eq=False)
class Client:
    at_round: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    priority: int
    tenant: str
    parent: Client | None = None
    """The client whose request this one forks."""
    beam_search: BeamSearchParams | None = None
    window: int = NO_WINDOW
    """Sliding window of the model."""
    wants_vector: bool = False
    patience_s: float | None = None
    """Seconds until the deadline of the request; None: no deadline."""
    leaves_in: str | None = None
    """State of the request in which the client leaves: one of `STATES`, or `ANYWHERE`; None: it stays."""
    leaves_from_round: int = 0
    stream: RequestStream | None = None
    """None if the request was refused."""
    engine: Engine | None = None
    left_in: str | None = None
    outputs: list[RequestOutput] = field(default_factory=list)
    """Outputs that the engine published for the request."""

    @property
    def fits(self) -> bool:
        return len(self.prompt_token_ids) + self.sampling.max_tokens <= MAX_MODEL_LEN

    @property
    def has_ended(self) -> bool:
        return bool(self.outputs) and self.outputs[-1].finished

    @property
    def is_poisoned(self) -> bool:
        return POISON in self.prompt_token_ids

    @cached_property
    def stop_token_ids(self) -> frozenset[int]:
        ends = () if self.sampling.ignore_eos else WordTokenizer.eos_token_ids
        return frozenset((*self.sampling.stop_token_ids, *ends))

    # --- the answer -------------------------------------------------------------------------------------------------

    @cached_property
    def _reference(self) -> list[int]:
        tokens = expected_output(self.prompt_token_ids, self.sampling.max_tokens, self.sampling.seed, self.window)
        ends = [index for index, token in enumerate(tokens) if token in self.stop_token_ids]
        return tokens[: ends[0] + 1] if ends else tokens

    @property
    def is_garbled(self) -> bool:
        """Whether the outputs differ from the reference answer (batch size 1)."""
        if not self.outputs:
            return False
        if self.beam_search is None:
            whole = join_pieces(self.outputs)
            generated = list(whole.token_ids)
            return generated != self._reference[: len(generated)] or self._is_prompt_garbled(whole)
        beams = [beam.token_ids for piece in self.outputs for beam in piece.beams]
        return bool(beams) and beams != self._reference_beams()

    def check_answer(self) -> None:
        """Raise AssertionError unless the outputs are the reference answer, or a prefix if the request ended early."""
        whole = join_pieces(self.outputs)
        ended_early = whole.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH)
        generated = list(whole.token_ids)
        if self.beam_search is None:
            reference = self._reference[: len(generated)] if ended_early else self._reference
            assert generated == reference, f"{whole.request_id} generated {generated}, expected {reference}"
            self._check_logprobs(whole)
            self._check_prompt(whole, ended_early)
        elif ended_early:
            assert not generated and not whole.beams, f"{whole.request_id} returned beams of an unfinished search"
        else:
            beams = [beam.token_ids for beam in whole.beams]
            reference = self._reference_beams()
            assert beams == reference, f"{whole.request_id} returned the beams {beams}, expected {reference}"

    def _reference_beams(self) -> list[tuple[int, ...]]:
        assert self.beam_search is not None
        asked = self.prompt_token_ids, self.beam_search, self.sampling.max_tokens, self.stop_token_ids
        return expected_beams(*asked, self.window)

    def _check_prompt(self, whole: RequestOutput, ended_early: bool) -> None:
        """Check that prompt results are complete, or a prefix if the request ended early."""
        received = whole.prompt_logprobs
        num_received = 0 if received is None else len(received)
        num_requested = 0 if self.sampling.prompt_logprobs is None else len(self.prompt_token_ids) - 1
        assert num_received == num_requested or (ended_early and num_received < num_requested), (
            f"{whole.request_id} has results of {num_received} of {num_requested} prompt tokens"
        )
        assert ended_early or (whole.vector is not None) is self.wants_vector, f"{whole.request_id} has no vector"
        assert not self._is_prompt_garbled(whole), f"{whole.request_id} has other results of its prompt"

    def _is_prompt_garbled(self, whole: RequestOutput) -> bool:
        """Return whether prompt results differ from those of the reference."""
        prompt, received = self.prompt_token_ids, whole.prompt_logprobs
        if whole.vector is not None and whole.vector.tolist() != vector_of(seen(prompt, self.window)).tolist():
            return True
        if received is None:
            return False
        count = self.sampling.prompt_logprobs or 0
        reference = [
            _token_logprobs(seen(prompt[:index], self.window), prompt[index], count)
            for index in range(1, min(len(received) + 1, len(prompt)))
        ]
        return received.tokens(count) != reference

    def _check_logprobs(self, whole: RequestOutput) -> None:
        count = self.sampling.logprobs
        assert len(whole.logprobs) == (0 if count is None else len(whole.token_ids))
        for index, token in enumerate(whole.logprobs):
            context = seen(self.prompt_token_ids + list(whole.token_ids[:index]), self.window)
            reference = _token_logprobs(context, whole.token_ids[index], count or 0)
            assert token == reference, f"{whole.request_id} has {token}, expected {reference}"

    # --- leaving ----------------------------------------------------------------------------------------------------

    def state(self) -> str:
        assert self.stream is not None and self.engine is not None
        if self.has_ended:
            return "ended"
        request = self.engine._processor.find(self.stream.request_id)
        return ARRIVING if request is None else _state(request, self.engine)


def _token_logprobs(context: list[int], token_id: int, count: int) -> TokenLogprobs:
    """Return the model's log-probabilities of a token after `context`."""
    logprobs, top = next_logprobs(context), most_likely(context)[:count]
    logprob = POISON_LOGPROB if token_id == POISON else float(logprobs[token_id])
    return TokenLogprobs(token_id, logprob, tuple(top.tolist()), tuple(logprobs[top].tolist()))


def _state(request: Request, engine: Engine) -> str:
    scheduler = engine.scheduler
    if request.beam_search is not None:
        return "beam search"
    if request.status is RequestStatus.WAITING:
        if scheduler.blocks.is_swapped(request.request_id):
            return "swapped"
        if request in scheduler.waiting_requests.forks.get(request.fork_of or "", ()):
            return "waiting for its parent"
        if not request.has_run:
            return "waiting"
        return "lost" if request.num_lost_steps else "preempted"
    if any(row.request is request for schedule in engine._in_flight for row in schedule.rows):
        return "in flight"
    return "between two steps" if request.is_decoding else "in prefill"


def _make_hostile(client: Client, rng: random.Random, number: int) -> None:
    """Make the client hostile: extreme priorities, a tenant for each request, maximum lengths, few arrival times."""
    client.priority = rng.choice((-MAX_PRIORITY, MAX_PRIORITY, -100 - number, 100 - number))
    client.tenant = f"hostile {number}"
    client.at_round = rng.choice((0, 20))
    max_tokens = MAX_MODEL_LEN - len(client.prompt_token_ids)
    if max_tokens > 0 and rng.random() < 0.5:
        client.sampling = replace(client.sampling, max_tokens=max_tokens, ignore_eos=True)


def _request_prompt_results(client: Client, rng: random.Random) -> None:
    """Let some clients request prompt results, and some only these.

    A generator of its own keeps the other drawn values.
    """
    if rng.random() < 0.15:
        client.sampling = replace(client.sampling, prompt_logprobs=rng.choice((0, 2)))
    if rng.random() < 0.05:
        client.sampling = replace(client.sampling, max_tokens=0)
    client.wants_vector = rng.random() < 0.1


def _draw_patience(rng: random.Random) -> float | None:
    """Draw seconds until a deadline, from none to nearly enough; most clients have no deadline."""
    return rng.choice((0.0, 0.01, 0.1, 0.5, 2.0)) if rng.random() < 0.15 else None


def draw_clients(rng: random.Random, *, beams: bool, window: int | None = None) -> list[Client]:
    """Return the clients of one seed in order of arrival; in some seeds most are hostile.

    `window`: sliding window of the model; None: no window.
    """
    clients: list[Client] = []
    poisons = rng.random() < 0.06
    share_of_hostile = rng.choice((0.0, 0.0, 0.8))
    for number in range(rng.randint(1, 12)):
        num_prompt = rng.randint(1, 28) if rng.random() < 0.97 else rng.randint(MAX_MODEL_LEN - 8, MAX_MODEL_LEN)
        client = Client(
            at_round=rng.randint(0, 40),
            prompt_token_ids=list(range(100, 100 + num_prompt)),
            sampling=SamplingParams(
                max_tokens=rng.randint(1, 16),
                temperature=0.0,
                seed=rng.randint(0, 3),
                stop_token_ids=tuple(rng.sample(range(1000), rng.choice((20, 100)))) if rng.random() < 0.3 else (),
                ignore_eos=rng.random() < 0.5,
                logprobs=rng.choice((0, 2)) if rng.random() < 0.1 else None,
                bad_words=NEVER_GENERATED if rng.random() < 0.1 else (),
            ),
            priority=rng.randint(-2, 2),
            tenant=rng.choice("abc"),
            window=NO_WINDOW if window is None else window,
        )
        if rng.random() < share_of_hostile:
            _make_hostile(client, rng, number)
        kind = rng.random()
        if clients and kind < 0.25:
            client.parent = clients[-1]
            client.prompt_token_ids, client.tenant = client.parent.prompt_token_ids, client.parent.tenant
            client.at_round = client.parent.at_round
        elif poisons:
            client.prompt_token_ids[rng.randrange(num_prompt)] = POISON
            poisons = False
        if beams and kind > 0.9:
            width = rng.randint(1, 4)
            client.beam_search = BeamSearchParams(
                width=width, num_returned=rng.randint(1, width), early_stopping=rng.random() < 0.3
            )
            client.sampling = replace(client.sampling, bad_words=())  # refused with a beam search
        if client.beam_search is None:
            _request_prompt_results(client, random.Random(f"{number} {num_prompt} {client.at_round}"))
        client.patience_s = _draw_patience(random.Random(f"patience {number} {num_prompt} {client.at_round}"))
        if rng.random() < 0.3:
            client.leaves_in = rng.choice((ANYWHERE, *STATES))
            client.leaves_from_round = client.at_round + rng.randint(0, 20)
        clients.append(client)
    return sorted(clients, key=lambda each: each.at_round)
