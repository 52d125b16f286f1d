"""The n-gram proposer: it proposes the tokens that followed an earlier occurrence of the same n-gram.

It searches, in this order, finished answers for an n-gram of 2 * `length` tokens, the request's own text for an n-gram
of `length` tokens (Saxena, "Prompt Lookup Decoding", 2023), and finished answers for an n-gram of `length` tokens (Hu
et al., "SAM Decoding", 2024). A match is used as long as it predicts the output.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final, Protocol, SupportsInt

import numpy as np
from numpy.typing import NDArray

from llm_serving.core.request import RUNNING, Request
from llm_serving.core.request_class import cache_namespace
from llm_serving.core.timings import Clock
from llm_serving.speculation.statistics import (
    FIRST_TOKEN_RATE,
    MIN_ACCEPTANCE_RATE,
    RATE_DECAY,
    MovingAverage,
    RequestStatistics,
    no_time,
)

FINISHED_TOKENS: Final = 2**18
MAX_INDEXED_TOKENS: Final = 8192
"""Maximum number of prompt tokens that are searched: the last ones."""
INDEX_SHARE: Final = 4
"""Finished answers are indexed together, once they are 1/INDEX_SHARE of the rows: many take as long as one."""
FAILED_TOKEN: Final = -1
"""Output token of a failed step. In a draft, a negative id would refer to the previous step."""
MATCH_TOKENS: Final = 1.4
"""Assumed number of tokens that a match saves if it predicts the next token."""
LOOKUP_SHARE: Final = 0.0025
"""Fraction of the step time that lookups in rotation may take."""
LOOKUP_S: Final = 2.5e-6
LOOKUP_MEMORY: Final = 16
TOKEN_BITS: Final = 32
"""Bits of a token in an n-gram. An n-gram is one integer, because an integer is hashed faster than a tuple."""
_FACTOR: Final = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio. Its multiples differ in their upper bits (Knuth, TAOCP 3, 6.4)."""
_BITS: Final = 64

Int64Array = NDArray[np.int64]


class SlotTable(Protocol):
    """Array that maps a hash slot to an integer. An empty slot has the value 0."""

    def __getitem__(self, slot: int, /) -> SupportsInt: ...

    def __setitem__(self, slots: Int64Array, values: Int64Array, /) -> None: ...


def dense_table(num_slots: int) -> Int64Array:
    return np.full(num_slots, 0, np.int64)


class FinishedAnswersIndex:
    """N-grams of the latest finished answers. A lookup finds only answers of its own namespace.

    As in LZ4, the hash of an n-gram selects a slot, which holds the position after the last occurrence. Later n-grams
    overwrite the slot, so a lookup compares the tokens. Adding many answers takes a few array operations, and removing
    one takes no time.
    """

    def __init__(
        self,
        length: int,
        max_tokens: int,
        *,
        table: Callable[[int], SlotTable] = dense_table,
        salt: Callable[[str], int] = hash,
    ) -> None:
        self._weights = [pow(_FACTOR, power, 1 << _BITS) for power in range(1, 2 * length + 1)]
        self._max_tokens = max_tokens
        slot_bits = (2 * max_tokens).bit_length()
        self._shift = _BITS - slot_bits
        self._salt = salt
        self._slots = {each: table(1 << slot_bits) for each in (length, 2 * length)}
        """N-gram length -> hash -> (number of the answer << 32 | index of the token after the n-gram)."""
        self._answers: dict[int, tuple[str, Sequence[int]]] = {}
        self._num_answers = 0
        self.num_tokens = 0

    def find(self, namespace: str, tokens: Sequence[int], length: int) -> tuple[Sequence[int], int] | None:
        """Find the last `length` of `tokens` in finished answers. Return (answer, index after them), or None."""
        if not self._answers or len(tokens) < length:
            return None
        newest = tokens[-length:]
        key = self._salt(namespace) + sum(map(int.__mul__, reversed(newest), self._weights))
        value = int(self._slots[length][(key & (1 << _BITS) - 1) >> self._shift])
        owner, answer = self._answers.get(value >> 32, ("", ()))
        index = value & 0xFFFFFFFF
        if index < length or owner != namespace or list(answer[index - length : index]) != newest:
            return None
        return answer, index

    def add(self, answers: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Add answers, as (namespace, tokens), and remove the oldest. Answers above `max_tokens` are skipped."""
        first, salts, texts, lengths = self._num_answers + 1, [], [], []
        for answer in answers:
            namespace, tokens = answer
            if len(tokens) <= self._max_tokens:
                self._num_answers += 1
                self._answers[self._num_answers] = answer
                salts.append(self._salt(namespace) & (1 << _BITS) - 1)
                texts.append(tokens)
                lengths.append(len(tokens))
        if not texts:
            return
        num_tokens = sum(lengths)
        self.num_tokens += num_tokens
        while self.num_tokens > self._max_tokens:
            self.num_tokens -= len(self._answers.pop(next(iter(self._answers)))[1])
        joined = np.fromiter(chain.from_iterable(texts), np.uint64, num_tokens)
        starts = np.cumsum(lengths) - lengths
        values = np.repeat((np.arange(first, first + len(texts)) << 32) - starts, lengths) + np.arange(num_tokens)
        keys = np.repeat(np.array(salts, np.uint64), lengths)
        for length, weight in enumerate(self._weights, 1):
            keys[length:] += joined[:-length] * np.uint64(weight)
            if (slots := self._slots.get(length)) is not None:
                slots[(keys[length:] >> np.uint64(self._shift)).astype(np.int64)] = values[length:]


class NgramLookup:
    """The tokens of one request, and the draft from an n-gram match in them or in finished answers.

    `advance` is cheap and is called for each new token. `search` indexes the new tokens and searches for a match.
    """

    def __init__(
        self, prompt_token_ids: Sequence[int], namespace: str, length: int, finished: FinishedAnswersIndex
    ) -> None:
        self._tokens = list(prompt_token_ids[-MAX_INDEXED_TOKENS:])
        self.num_output_tokens = 0
        self._namespace = namespace
        self._length = length
        self._finished = finished
        self._positions: dict[int, int] = {}
        self._mask = (1 << length * TOKEN_BITS) - 1
        self._ngram = 0
        self._indexed = 0
        self._draft: Sequence[int] | None = None
        self._index = 0

    @property
    def has_draft(self) -> bool:
        return self._draft is not None

    def propose(self, count: int) -> list[int]:
        """Return at most `count` draft tokens. If these reach the end of the request's own text, repeat them."""
        if self._draft is None:
            return []
        token_ids = list(self._draft[self._index : self._index + count])
        while len(token_ids) < count and self._draft is self._tokens:
            token_ids += token_ids[: count - len(token_ids)]
        return token_ids

    def advance(self, token_ids: Sequence[int]) -> tuple[int, bool]:
        """Append output tokens. Return how many the draft predicted, and whether it was wrong about the next one."""
        self._tokens += token_ids
        self.num_output_tokens += len(token_ids)
        draft, index = self._draft, self._index
        if draft is None:
            return 0, False
        for num_matched, token_id in enumerate(token_ids):
            if index == len(draft) or draft[index] != token_id:
                self._draft = None
                return num_matched, index < len(draft)
            index += 1
        self._index = index
        if index == len(draft):
            self._draft = None
        return len(token_ids), False

    def search(self) -> bool:
        """Index the new tokens and search for a draft that follows the latest token. Return whether one was found."""
        self._draft = None
        tokens, length = self._tokens, self._length
        if len(tokens) < length:
            return False
        positions, mask, ngram, start = self._positions, self._mask, self._ngram, self._indexed
        if not start:
            start = length
            for token_id in tokens[:start]:
                ngram = ngram << TOKEN_BITS | token_id
        for index in range(start, len(tokens)):
            positions[ngram] = index
            ngram = (ngram << TOKEN_BITS | tokens[index]) & mask
        self._ngram, self._indexed = ngram, len(tokens)
        found = self._finished.find(self._namespace, tokens, 2 * length)
        if found is None:
            if (position := positions.get(ngram)) is not None:
                found = tokens, position
            else:
                found = self._finished.find(self._namespace, tokens, length)
        if found is not None:
            self._draft, self._index = found
        return found is not None


@dataclass(eq=False, kw_only=True)
class RequestDrafts(RequestStatistics):
    lookup: NgramLookup

    def expected_match_rate(self, num_output_tokens: int) -> float:
        num_seen = self.lookup.num_output_tokens
        known = max(self.match_rate, FIRST_TOKEN_RATE * RATE_DECAY**num_seen)
        return float(known * RATE_DECAY ** (num_output_tokens - num_seen))

    def compare(self, output_token_ids: list[int]) -> bool:
        lookup = self.lookup
        self.record_match(*lookup.advance(output_token_ids[lookup.num_output_tokens :]))
        return lookup.has_draft

    def search(self, output_token_ids: list[int]) -> bool:
        unpredicted = output_token_ids[self.lookup.num_output_tokens :]
        self.lookup.advance(unpredicted)
        self.match_rate *= RATE_DECAY ** len(unpredicted)
        self._is_confirmed = False
        return self.lookup.search()


class NgramProposer:
    """Keeps an n-gram draft for each request of an engine, even if the draft is not used.

    It compares each output token with the draft, so the acceptance rate is known before any draft is verified. A
    request without a draft gets a lookup if the expected gain exceeds the cost. All other requests without a draft get
    lookups in rotation, which take `LOOKUP_SHARE` of the step time.
    """

    def __init__(self, length: int, finished: FinishedAnswersIndex | None = None, clock: Clock | None = None) -> None:
        """`finished` is by default a new index of `FINISHED_TOKENS` tokens. `clock` measures how long lookups take.

        Without `clock`, each lookup is assumed to take `LOOKUP_S`.
        """
        self._length = length
        self._is_timed = clock is not None
        self._now: Clock = no_time if clock is None else clock
        self.finished = FinishedAnswersIndex(length, FINISHED_TOKENS) if finished is None else finished
        self.requests: OrderedDict[Request, RequestDrafts] = OrderedDict()
        """All requests, in the order of their lookups in rotation."""
        self.matched: dict[Request, RequestDrafts] = {}
        self.unmatched: dict[Request, RequestDrafts] = {}
        """Requests without a draft for which a lookup may gain more than it costs."""
        self.lookup_time = MovingAverage(LOOKUP_MEMORY, LOOKUP_S)
        self._new_answers: list[tuple[str, tuple[int, ...]]] = []
        self._credit = 0.0

    def add_request(self, request: Request, model_rate: float) -> RequestDrafts:
        if not self.requests:
            self.add_finished((), 0)
        namespace = cache_namespace(request.tenant, request.cache_salt, request.adapter)
        lookup = NgramLookup(request.prompt_token_ids, namespace, self._length, self.finished)
        drafts = RequestDrafts(max(model_rate, MIN_ACCEPTANCE_RATE), lookup=lookup)
        self.requests[request] = self.unmatched[request] = drafts
        self.requests.move_to_end(request, last=False)
        return drafts

    def add_finished(self, requests: Iterable[Request], num_rows: int) -> None:
        """Store finished answers for later lookups, each up to the first `FAILED_TOKEN`, the output of a failed step.

        They are indexed in batches of at least `num_rows` / `INDEX_SHARE` answers. `num_rows`: rows of the latest step.
        """
        for request in requests:
            token_ids = tuple(request.output_token_ids)
            if FAILED_TOKEN in token_ids:
                token_ids = token_ids[: token_ids.index(FAILED_TOKEN)]
            self._new_answers.append((cache_namespace(request.tenant, request.cache_salt, request.adapter), token_ids))
        if len(self._new_answers) * INDEX_SHARE >= num_rows:
            answers, self._new_answers = self._new_answers, []
            self.finished.add(answers)

    def update(self, num_rows: int, num_steps: int, step_s: float, could_pay: Callable[[], bool]) -> bool:
        """Compare new output tokens with the drafts, and look up new drafts. `num_steps`: steps since the last update.

        Return whether any lookup was expected to save time. `could_pay()`: whether the best drafts would save time.
        """
        for request, drafts in list(self.matched.items()):
            if not drafts.compare(request.output_token_ids):
                del self.matched[request]
                self.unmatched[request] = drafts
                self.requests.move_to_end(request, last=False)
        promising = self._promising(num_rows, step_s)
        if promising and not could_pay():
            promising = []
        chosen = list(dict.fromkeys(promising + self._next_in_rotation(num_steps, step_s)))
        began = self._now()
        for request in chosen:
            self._look_up(request)
        if self._is_timed and chosen:
            self.lookup_time.add((self._now() - began) / len(chosen))
        return bool(promising)

    def _promising(self, num_rows: int, step_s: float) -> list[Request]:
        """Return running requests whose lookup should save more time than it costs. Remove requests without this
        prospect from `unmatched`. `step_s`: seconds of a step.
        """
        cost_s = num_rows * self.lookup_time.value
        if cost_s >= step_s:
            return []
        promising = []
        for request, drafts in list(self.unmatched.items()):
            if MATCH_TOKENS * drafts.expected_match_rate(len(request.output_token_ids)) * step_s <= cost_s:
                del self.unmatched[request]
            elif request.status is RUNNING:
                promising.append(request)
        return promising

    def _next_in_rotation(self, num_steps: int, step_s: float) -> list[Request]:
        num_requests = float(len(self.requests))
        credit = self._credit + num_steps * LOOKUP_SHARE * step_s / self.lookup_time.value
        self._credit = min(num_requests, credit) if step_s else num_requests
        num_lookups = int(self._credit)
        self._credit -= num_lookups
        chosen = []
        for request in list(islice(self.requests, num_lookups)):
            self.requests.move_to_end(request)
            if request not in self.matched:
                chosen.append(request)
        return chosen

    def _look_up(self, request: Request) -> None:
        drafts, output = self.requests[request], request.output_token_ids
        is_last = len(output) + 1 >= request.sampling.max_tokens  # no draft token could follow the next one
        if request not in self.matched and not is_last and drafts.search(output):
            self.matched[request] = drafts
            self.unmatched.pop(request, None)
