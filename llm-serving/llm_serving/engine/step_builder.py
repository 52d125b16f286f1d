"""From the scheduler's decision to the arrays of a step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from llm_serving.core.request import Request
from llm_serving.core.step import SamplingInput, StepInput, sampled_in_previous_step
from llm_serving.kvcache import BlockManager
from llm_serving.scheduler import Schedule, ScheduledRow

_FORBIDDEN = float("-inf")


class StepBuilder:
    """Builds each step's input; remembers where the step before it samples which request.

    Only there can a token be that is not known here yet: a request that is not in step k had its tokens come back
    before step k + 1 is formed.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._previous_samples: dict[str, int] = {}

    def build(self, schedule: Schedule, number: int) -> StepInput:
        """Call once for every schedule, in order, before the next one is made.

        Args:
            schedule: What is to be computed.
            number: Of the step, as the WorkAgent counts.
        """
        rows = schedule.rows
        tables = [self._blocks.table(row.request.request_id) for row in rows]
        token_ids: list[int] = []
        for row in rows:
            token_ids += self._row_token_ids(row)
        sample_rows = [index for index, row in enumerate(rows) if row.samples]
        sampled = [rows[index].request for index in sample_rows]
        step = StepInput(
            step=number,
            token_ids=np.array(token_ids, np.int32),
            query_lens=np.array([row.query_len for row in rows], np.int32),
            num_computed=np.array([row.num_computed for row in rows], np.int32),
            block_tables=_packed([table.ids for table in tables]),
            block_epochs=_packed([table.epochs for table in tables]),
            sample_rows=np.array(sample_rows, np.int32),
            sampling=self._sampling(sampled),
            block_moves=np.array(schedule.block_moves, np.int32).reshape(-1, 3),
        )
        self._previous_samples = {request.request_id: index for index, request in enumerate(sampled)}
        return step

    def _row_token_ids(self, row: ScheduledRow) -> list[int]:
        """The row's tokens; the newest one may still be on the device."""
        end = row.num_computed + row.query_len
        known = row.request.known_token_ids(row.num_computed, min(end, row.request.num_tokens_known))
        if len(known) < row.query_len:
            known.append(sampled_in_previous_step(self._previous_samples[row.request.request_id]))
        return known

    def _sampling(self, requests: list[Request]) -> SamplingInput:
        params = [request.sampling for request in requests]
        histories = [self._history(request) for request in requests]
        biases = [_biases(request) for request in requests]
        return SamplingInput(
            temperature=np.array([p.temperature for p in params], np.float32),
            top_k=np.array([p.top_k for p in params], np.int32),
            top_p=np.array([p.top_p for p in params], np.float32),
            min_p=np.array([p.min_p for p in params], np.float32),
            repetition_penalty=np.array([p.repetition_penalty for p in params], np.float32),
            presence_penalty=np.array([p.presence_penalty for p in params], np.float32),
            frequency_penalty=np.array([p.frequency_penalty for p in params], np.float32),
            seed=np.array([p.seed for p in params], np.uint64),
            # The token being chosen was counted as in flight when the step was scheduled.
            position=np.array([request.num_tokens - 1 for request in requests], np.int32),
            num_logprobs=np.array([-1 if p.logprobs is None else p.logprobs for p in params], np.int32),
            history_offsets=_offsets([len(history) for history in histories]),
            history_token_ids=np.array([token for history in histories for token in history], np.int32),
            history_prompt_lens=np.array(
                [request.num_prompt_tokens if request.sampling.has_penalties else 0 for request in requests], np.int32
            ),
            bias_offsets=_offsets([len(bias) for bias in biases]),
            bias_token_ids=np.array([token for bias in biases for token, _ in bias], np.int32),
            bias_values=np.array([value for bias in biases for _, value in bias], np.float32),
        )

    def _history(self, request: Request) -> list[int]:
        """Tokens before the one being chosen, where penalties need them."""
        if not request.sampling.has_penalties:
            return []
        history = request.prompt_token_ids + request.output_token_ids
        if len(history) < request.num_tokens - 1:
            history.append(sampled_in_previous_step(self._previous_samples[request.request_id]))
        return history


def _biases(request: Request) -> list[tuple[int, float]]:
    """The request's logit biases; below `min_tokens` the ids that would end it are forbidden."""
    params = request.sampling
    biases = list(params.logit_bias)
    if request.num_output_tokens <= params.min_tokens:
        biases += [(token_id, _FORBIDDEN) for token_id in sorted(request.stop_token_ids)]
    return biases


def _packed(rows: Sequence[array[int]]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """Rows of different lengths as one array, zeros behind the shorter ones."""
    lengths = np.array([len(row) for row in rows])
    width = lengths.max()
    packed = np.zeros((len(rows), width), np.int32)
    packed[np.arange(width) < lengths[:, None]] = np.frombuffer(b"".join(rows), np.int32)
    return packed


def _offsets(lengths: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(list(accumulate(lengths, initial=0)), np.int32)
