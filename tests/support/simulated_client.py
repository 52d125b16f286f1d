"""A client of the simulation: what it asks for, what it would be answered alone, when it leaves."""

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
NEVER_SAID = ((POISON, POISON),)
"""Words that make a request wait for every token."""
ARRIVING, RESTARTING, ANYWHERE = "in the inbox", "during a restart", "anywhere"
STATES = (
    *(ARRIVING, "waiting", "waiting for its twin", "preempted", "swapped", "lost", RESTARTING),
    *("in its prompt", "in flight", "between two tokens", "beam search", "ended"),
)
"""Where a request is when its client leaves."""


@dataclass(eq=False)
class Client:
    """Asks for one request."""

    at_round: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    priority: int
    tenant: str
    twin: Client | None = None
    """Who asked for another answer to the same prompt."""
    beam_search: BeamSearchParams | None = None
    window: int = NO_WINDOW
    """Of the model."""
    wants_vector: bool = False
    patience_s: float | None = None
    """Seconds after which the answer is of no more use to it; None: it waits for it."""
    leaves_in: str | None = None
    """The state of its request in which it leaves: one of `STATES`, or `ANYWHERE`; None: it stays."""
    leaves_from_round: int = 0
    stream: RequestStream | None = None
    """None when it was refused."""
    engine: Engine | None = None
    left_in: str | None = None
    told: list[RequestOutput] = field(default_factory=list)
    """What the engine published for it."""

    @property
    def fits(self) -> bool:
        return len(self.prompt_token_ids) + self.sampling.max_tokens <= MAX_MODEL_LEN

    @property
    def has_ended(self) -> bool:
        return bool(self.told) and self.told[-1].finished

    @property
    def is_poisoned(self) -> bool:
        return POISON in self.prompt_token_ids

    @cached_property
    def stop_token_ids(self) -> frozenset[int]:
        ends = () if self.sampling.ignore_eos else WordTokenizer.eos_token_ids
        return frozenset((*self.sampling.stop_token_ids, *ends))

    # --- the answer -------------------------------------------------------------------------------------------------

    @cached_property
    def _alone(self) -> list[int]:
        tokens = expected_output(self.prompt_token_ids, self.sampling.max_tokens, self.sampling.seed, self.window)
        ends = [index for index, token in enumerate(tokens) if token in self.stop_token_ids]
        return tokens[: ends[0] + 1] if ends else tokens

    @property
    def is_garbled(self) -> bool:
        """Whether it was told a token that it would not have been told alone, or anything else of its prompt."""
        if not self.told:
            return False
        if self.beam_search is None:
            whole = join_pieces(self.told)
            given = list(whole.token_ids)
            return given != self._alone[: len(given)] or self._is_prompt_garbled(whole)
        beams = [beam.token_ids for piece in self.told for beam in piece.beams]
        return bool(beams) and beams != self._beams_alone()

    def check_answer(self) -> None:
        """Raises AssertionError unless it was told what it would be told alone, or the beginning of that."""
        whole = join_pieces(self.told)
        broken_off = whole.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH)
        given = list(whole.token_ids)
        if self.beam_search is None:
            alone = self._alone[: len(given)] if broken_off else self._alone
            assert given == alone, f"{whole.request_id} was answered {given} and not {alone}"
            self._check_logprobs(whole)
            self._check_prompt(whole, broken_off)
        elif broken_off:
            assert not given and not whole.beams, f"{whole.request_id} was told beams of an unfinished search"
        else:
            beams = [beam.token_ids for beam in whole.beams]
            alone = self._beams_alone()
            assert beams == alone, f"{whole.request_id} was answered the beams {beams} and not {alone}"

    def _beams_alone(self) -> list[tuple[int, ...]]:
        assert self.beam_search is not None
        asked = self.prompt_token_ids, self.beam_search, self.sampling.max_tokens, self.stop_token_ids
        return expected_beams(*asked, self.window)

    def _check_prompt(self, whole: RequestOutput, broken_off: bool) -> None:
        """It was told of every token of its prompt but the first, once, or of the beginning of that."""
        told = whole.prompt_logprobs
        num_told = 0 if told is None else len(told)
        num_wanted = 0 if self.sampling.prompt_logprobs is None else len(self.prompt_token_ids) - 1
        assert num_told == num_wanted or (broken_off and num_told < num_wanted), (
            f"{whole.request_id} was told of {num_told} of {num_wanted} tokens"
        )
        assert broken_off or (whole.vector is not None) is self.wants_vector, f"{whole.request_id} has no vector"
        assert not self._is_prompt_garbled(whole), f"{whole.request_id} was told something else of its prompt"

    def _is_prompt_garbled(self, whole: RequestOutput) -> bool:
        """Whether anything that was told of its prompt is not what would have been told alone."""
        prompt, told = self.prompt_token_ids, whole.prompt_logprobs
        if whole.vector is not None and whole.vector.tolist() != vector_of(seen(prompt, self.window)).tolist():
            return True
        if told is None:
            return False
        count = self.sampling.prompt_logprobs or 0
        alone = [
            _token_logprobs(seen(prompt[:place], self.window), prompt[place], count)
            for place in range(1, min(len(told) + 1, len(prompt)))
        ]
        return told.tokens(count) != alone

    def _check_logprobs(self, whole: RequestOutput) -> None:
        count = self.sampling.logprobs
        assert len(whole.logprobs) == (0 if count is None else len(whole.token_ids))
        for place, token in enumerate(whole.logprobs):
            context = seen(self.prompt_token_ids + list(whole.token_ids[:place]), self.window)
            alone = _token_logprobs(context, whole.token_ids[place], count or 0)
            assert token == alone, f"{whole.request_id} was told {token} and not {alone}"

    # --- leaving ----------------------------------------------------------------------------------------------------

    def state(self) -> str:
        """Where its request is now."""
        assert self.stream is not None and self.engine is not None
        if self.has_ended:
            return "ended"
        request = self.engine._processor.find(self.stream.request_id)
        return ARRIVING if request is None else _state(request, self.engine)


def _token_logprobs(context: list[int], token_id: int, count: int) -> TokenLogprobs:
    """What the model says of a token behind `context`."""
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
            return "waiting for its twin"
        if not request.has_run:
            return "waiting"
        return "lost" if request.num_lost_steps else "preempted"
    if any(row.request is request for schedule in engine._in_flight for row in schedule.rows):
        return "in flight"
    return "between two tokens" if request.is_decoding else "in its prompt"


def _lie(client: Client, rng: random.Random, number: int) -> None:
    """The worst priorities, a name for each request, prompts or answers as long as may be, many at one moment."""
    client.priority = rng.choice((-MAX_PRIORITY, MAX_PRIORITY, -100 - number, 100 - number))
    client.tenant = f"liar {number}"
    client.at_round = rng.choice((0, 20))
    longest = MAX_MODEL_LEN - len(client.prompt_token_ids)
    if longest > 0 and rng.random() < 0.5:
        client.sampling = replace(client.sampling, max_tokens=longest, ignore_eos=True)


def _ask_of_prompt(client: Client, rng: random.Random) -> None:
    """Some want to be told of their prompts, some of these of nothing else; numbers of their own leave others alone."""
    if rng.random() < 0.15:
        client.sampling = replace(client.sampling, prompt_logprobs=rng.choice((0, 2)))
    if rng.random() < 0.05:
        client.sampling = replace(client.sampling, max_tokens=0)
    client.wants_vector = rng.random() < 0.1


def _draw_patience(rng: random.Random) -> float | None:
    """Some have none left when they come, some lose it between two steps, some have nearly as much as they need."""
    return rng.choice((0.0, 0.01, 0.1, 0.5, 2.0)) if rng.random() < 0.15 else None


def draw_clients(rng: random.Random, *, beams: bool, window: int | None = None) -> list[Client]:
    """The clients of one seed, in the order in which they come; liars among them in some seeds.

    `window`: of the model that answers them; None: it sees everything.
    """
    clients: list[Client] = []
    poisons = rng.random() < 0.06
    share_of_liars = rng.choice((0.0, 0.0, 0.8))
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
                bad_words=NEVER_SAID if rng.random() < 0.1 else (),
            ),
            priority=rng.randint(-2, 2),
            tenant=rng.choice("abc"),
            window=NO_WINDOW if window is None else window,
        )
        if rng.random() < share_of_liars:
            _lie(client, rng, number)
        kind = rng.random()
        if clients and kind < 0.25:
            client.twin = clients[-1]
            client.prompt_token_ids, client.tenant = client.twin.prompt_token_ids, client.twin.tenant
            client.at_round = client.twin.at_round
        elif poisons:
            client.prompt_token_ids[rng.randrange(num_prompt)] = POISON
            poisons = False
        if beams and kind > 0.9:
            width = rng.randint(1, 4)
            client.beam_search = BeamSearchParams(
                width=width, num_returned=rng.randint(1, width), early_stopping=rng.random() < 0.3
            )
        if client.beam_search is None:
            _ask_of_prompt(client, random.Random(f"{number} {num_prompt} {client.at_round}"))
        client.patience_s = _draw_patience(random.Random(f"patience {number} {num_prompt} {client.at_round}"))
        if rng.random() < 0.3:
            client.leaves_in = rng.choice((ANYWHERE, *STATES))
            client.leaves_from_round = client.at_round + rng.randint(0, 20)
        clients.append(client)
    return sorted(clients, key=lambda each: each.at_round)
