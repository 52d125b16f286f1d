"""Conversion of a schedule into the arrays of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, repeat
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from llm_serving.core.enums import PoolingMode
from llm_serving.core.request import Request
from llm_serving.core.sampling_params import RULES
from llm_serving.core.step import (
    NO_ADAPTERS,
    NO_BLOCK_MOVES,
    NO_SCORING,
    NO_STATE_ACCESSES,
    SAMPLE_FIELDS,
    SAMPLING_DTYPES,
    AllowedTokens,
    Int32Array,
    ResultKind,
    ResultToken,
    SamplingInput,
    ScoringInput,
    StepInput,
    reference_to_previous_step,
)
from llm_serving.kvcache import BlockManager
from llm_serving.kvcache.block_table import BlockTable
from llm_serving.scheduler import Schedule

REQUEST_ID, IDS, START = attrgetter("request_id"), attrgetter("ids"), attrgetter("start")
_FORBIDDEN = float("-inf")
_NO_WORDS: Int32Array = np.empty(0, np.int32)
_Sample = tuple[Request, int]
"""A token to be sampled: (request, number of draft tokens before it)."""
_NUMBERS = {name: (attrgetter(name), SAMPLING_DTYPES[name]) for name in SAMPLE_FIELDS if name in RULES}


class _Decoding(NamedTuple):
    """What the latest step that only decoded shares with a later one of the same requests."""

    requests: tuple[Request, ...]
    samples: list[_Sample]
    lengths: Int32Array  # [B], all 1
    result_tokens: Int32Array


class StepBuilder:
    """Builds the input of each step.

    A step may be built before the reply to the previous step. If a token id is not known yet, it is a sample of the
    previous step, and the input has a negative number that refers to this sample.
    """

    def __init__(self, blocks: BlockManager, pooling: PoolingMode = PoolingMode.LAST) -> None:
        self._blocks = blocks
        self._pooling = pooling
        self._decoding = _Decoding((), [], np.empty(0, np.int32), np.empty((0, 0), np.int32))
        self._params = _SamplingParams([], {})
        self._tables = _PackedTables()

    def build(self, schedule: Schedule, number: int) -> StepInput:
        """Build the input of step `number`. Call this once for every schedule, in order."""
        requests, starts, query_lens, *_ = zip(*schedule.rows, strict=True)
        num_computed = np.array(starts, np.int32)
        token_ids: list[int] = []
        previous = self._params.indices
        if not schedule.has_draft_tokens and schedule.num_tokens == schedule.num_samples == len(requests):
            for request, start in zip(requests, starts, strict=True):  # each computes its latest token
                output = request.output_token_ids
                if request.num_tokens_in_flight > 1:  # the token is still on the device
                    token_ids.append(-1 - previous[request])  # `reference_to_previous_step`, without the call
                else:
                    token_ids.append(output[-1] if output else request.prompt_token_ids[start])
            if requests != self._decoding.requests:
                result_tokens = np.zeros((len(requests), len(ResultToken._fields)), np.int32)  # of kind TOKEN
                result_tokens[:, 0] = np.arange(len(requests))
                samples = list(zip(requests, repeat(0), strict=False))
                self._decoding = _Decoding(requests, samples, np.ones(len(requests), np.int32), result_tokens)
            _, samples, lengths, result_tokens = self._decoding
            positions = num_computed + lengths
        else:
            samples, token = [], ResultKind.TOKEN.value  # np.array is twice as fast with plain integers
            lengths = np.array(query_lens, np.int32)
            chosen: list[int] = []
            following: list[int] = []
            for index, (request, start, query_len, num_samples, _) in enumerate(schedule.rows):
                num_known, end = len(request.prompt_token_ids) + len(request.output_token_ids), start + query_len
                if start < num_known:
                    token_ids += request.known_token_ids(start, end)
                if num_samples > 1:
                    token_ids += request.draft_token_ids
                elif end > num_known:  # the newest token is still on the device
                    token_ids.append(reference_to_previous_step(previous[request]))
                for draft in range(num_samples):
                    offset = query_len - num_samples + draft
                    samples.append((request, draft))
                    chosen += (index, offset, token)
                    following.append(start + offset + 1)
            positions = np.array(following, np.int32)
            result_tokens = np.array(chosen, np.int32).reshape(-1, len(ResultToken._fields))
        scoring = NO_SCORING
        if schedule.prompt_results:
            of_prompts, scoring = _prompt_results(schedule, self._pooling)
            result_tokens = np.concatenate([result_tokens, of_prompts])
        all_tables = list(map(self._blocks.tables.__getitem__, map(REQUEST_ID, requests)))
        groups = range(len(all_tables[0]))
        block_tables, block_epochs = self._tables.packed([each[group] for group in groups for each in all_tables])
        adapters = NO_ADAPTERS
        if (slots := self._blocks.adapters) is not None:
            adapters = np.array(
                [(of.adapter, slots.slot_of(of.adapter) if of.adapter else -1) for of, *_ in schedule.rows], np.int32
            )
        return StepInput(
            step=number,
            token_ids=np.array(token_ids, np.int32),
            query_lens=lengths,
            num_computed=num_computed,
            block_tables=block_tables,
            block_epochs=block_epochs,
            result_tokens=result_tokens,
            sampling=self._sampling(samples, positions),
            scoring=scoring,
            block_moves=np.array(schedule.block_moves, np.int32) if schedule.block_moves else NO_BLOCK_MOVES,
            exports=np.array(schedule.exports, np.int32) if schedule.exports else NO_BLOCK_MOVES,
            states=np.array(schedule.states, np.int32) if schedule.states else NO_STATE_ACCESSES,
            adapters=adapters,
            allowed_follow=self._params.has_matchers,
        )

    def allowed(self, schedule: Schedule) -> AllowedTokens:
        """Return the tokens that structured output allows for each sample. All earlier outputs must be known."""
        parts: list[Int32Array] = []
        for request, _, _, samples, _ in schedule.rows:
            matcher, output = request.matcher, request.output_token_ids
            if matcher is None:
                parts += [self._params.allowed.get(request, _NO_WORDS)] * samples
            elif request.is_finished or (output and output[-1] < 0):  # the sample will not be used
                parts += [_NO_WORDS] * samples
            elif samples:
                parts += matcher.allowed_words_after_drafts(output, request.draft_token_ids)
        return _joined(parts)

    def _sampling(self, samples: list[_Sample], positions: Int32Array) -> SamplingInput:
        params, previous = self._params, self._params.indices
        if params.samples != samples:
            params = self._params = _SamplingParams(samples, params.allowed)
        changes = {"position": positions}
        if params.has_penalties:
            histories = [_history(*sample, previous) for sample in samples]
            changes["history_offsets"] = _offsets([len(history) for history in histories])
            changes["history_token_ids"] = np.array(list(chain.from_iterable(histories)), np.int32)
        if params.has_biases:
            biases = [_biases(*sample) for sample in samples]
            changes["bias_offsets"] = _offsets([len(bias) for bias in biases])
            changes["bias_token_ids"] = np.array([token for bias in biases for token, _ in bias], np.int32)
            changes["bias_values"] = np.array([value for bias in biases for _, value in bias], np.float32)
        return replace(params.sampling, **changes)


def _history(request: Request, num_drafts: int, previous: Mapping[Request, int]) -> list[int]:
    if not request.sampling.has_penalties:
        return []
    history = request.prompt_token_ids + request.output_token_ids
    if len(history) < request.num_tokens - 1:
        history.append(reference_to_previous_step(previous[request]))
    return history + request.draft_token_ids[:num_drafts]


def _prompt_results(schedule: Schedule, pooling: PoolingMode) -> tuple[Int32Array, ScoringInput]:
    scores: list[ResultToken] = []
    vectors: list[ResultToken] = []
    token_ids: list[int] = []
    num_logprobs: list[int] = []
    kind = ResultKind.MEAN if pooling is PoolingMode.MEAN else ResultKind.VECTOR
    for row, start, end, vector, _ in schedule.prompt_results:
        request, first, *_ = schedule.rows[row]
        scores += [ResultToken(row, token - first, ResultKind.LOGPROBS) for token in range(start, end)]
        token_ids += request.prompt_token_ids[start + 1 : end + 1]
        num_logprobs += [request.sampling.prompt_logprobs or 0] * (end - start)
        if vector:
            token = 0 if pooling is PoolingMode.FIRST else request.num_prompt_tokens - 1 - first
            vectors.append(ResultToken(row, token, kind))
    result_tokens = np.array(scores + vectors, np.int32).reshape(-1, len(ResultToken._fields))
    offsets = np.arange(len(token_ids) + 1, dtype=np.int32)
    return result_tokens, ScoringInput(np.array(num_logprobs, np.int32), offsets, np.array(token_ids, np.int32))


class _SamplingParams:
    """A step's samples and their sampling parameters as arrays, which are reused while the samples stay the same."""

    def __init__(self, samples: list[_Sample], known: Mapping[Request, Int32Array]) -> None:
        self.samples = samples
        self.indices: dict[Request, int] = {}
        """Request -> index of its last sample, to which the next step may refer."""
        self.has_penalties = self.has_biases = self.has_matchers = False
        self.allowed: dict[Request, Int32Array] = {}
        values, num_logprobs, prompt_lens = [], [], []
        for index, (request, _) in enumerate(samples):
            self.indices[request] = index
            params, prompt_len = request.sampling, 0
            if params.has_penalties:
                self.has_penalties, prompt_len = True, len(request.prompt_token_ids)
            if params.logit_bias or params.min_tokens or params.bad_words:
                self.has_biases = True
            if params.allowed_token_ids is not None:
                self.allowed[request] = known[request] if request in known else _bits(params.allowed_token_ids)
            if request.matcher is not None:
                self.has_matchers = True
            values.append(params)
            num_logprobs.append(-1 if params.logprobs is None else params.logprobs)
            prompt_lens.append(prompt_len)
        numbers: dict[str, Any] = {}
        for name, (value_of, dtype) in _NUMBERS.items():
            numbers[name] = np.array(list(map(value_of, values)), dtype)
        self.sampling = SamplingInput.plain(
            len(samples),
            **numbers,
            num_logprobs=np.array(num_logprobs, np.int32),
            history_prompt_lens=np.array(prompt_lens, np.int32),
        )
        if self.allowed:
            allowed = _joined([self.allowed.get(request, _NO_WORDS) for request, _ in samples])
            self.sampling = self.sampling.with_allowed_tokens(allowed)


def _joined(parts: Sequence[Int32Array]) -> AllowedTokens:
    return AllowedTokens(_offsets([len(each) for each in parts]), np.concatenate([_NO_WORDS, *parts]))


def _biases(request: Request, num_drafts: int) -> list[tuple[int, float]]:
    """Return logit biases after `num_drafts` draft tokens. Bad words, and stop tokens before `min_tokens`, get -inf."""
    params = request.sampling
    biases = list(params.logit_bias)
    if request.num_output_tokens + num_drafts <= params.min_tokens:
        biases += [(token_id, _FORBIDDEN) for token_id in sorted(request.stop_token_ids)]
    output = request.output_token_ids + request.draft_token_ids[:num_drafts]
    biases += [
        (last, _FORBIDDEN)
        for *before, last in params.bad_words
        if not before or (len(before) <= len(output) and output[-len(before) :] == before)
    ]
    return biases


def _bits(token_ids: Sequence[int]) -> Int32Array:
    ids = np.array(token_ids, np.int64)
    bits = np.zeros(32 * (int(ids.max()) // 32 + 1), np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


class _PackedTables:
    """The block tables of the latest step as arrays. For the next step, only the rows that differ are replaced."""

    def __init__(self) -> None:
        self._tables: list[BlockTable] = []
        self._sizes: list[tuple[int, int]] = []
        """(number of entries, number without a block) of each table. A changed table has other numbers."""
        self._arrays = np.zeros((2, 0, 0), np.int32)

    def packed(self, tables: list[BlockTable]) -> tuple[Int32Array, Int32Array]:
        """Return block ids and epochs (allocation numbers), each [tables, longest table], padded with 0."""
        sizes = list(zip(map(len, map(IDS, tables)), map(START, tables), strict=True))
        width = max(sizes)[0]
        is_new = tables != self._tables or width != self._arrays.shape[2]
        if not is_new and sizes == self._sizes:
            return self._arrays[0], self._arrays[1]
        # Earlier steps have the old array.
        self._arrays = arrays = np.zeros((2, len(tables), width), np.int32) if is_new else self._arrays.copy()
        for index, table in enumerate(tables):
            if is_new or sizes[index] != self._sizes[index]:
                arrays[0, index, : len(table.ids)] = table.ids
                arrays[1, index, : len(table.ids)] = table.epochs
        self._tables, self._sizes = tables, sizes
        return arrays[0], arrays[1]


def _offsets(lengths: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(list(accumulate(lengths, initial=0)), np.int32)
