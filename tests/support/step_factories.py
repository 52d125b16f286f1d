"""Factories of steps and sampling inputs with defaults, so that a test shows only the values that matter to it."""

from itertools import accumulate

import numpy as np
from llm_serving.core.step import BlockMove, ResultKind, ResultToken, SamplingInput, ScoringInput, StepInput, TopTokens

_DEFAULTS = {
    "temperature": (np.float32, 0),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1),
    "min_p": (np.float32, 0),
    "typical_p": (np.float32, 1),
    "repetition_penalty": (np.float32, 1),
    "presence_penalty": (np.float32, 0),
    "frequency_penalty": (np.float32, 0),
    "seed": (np.uint64, 0),
    "position": (np.int32, 0),
    "num_logprobs": (np.int32, -1),
    "history_prompt_lens": (np.int32, 0),
}


def sampling_input(num_samples, history=None, bias=None, allowed=None, **fields):
    """Return greedy samples; a field is one value for all samples or a list.

    Args:
        num_samples: S.
        history: Sample -> token ids, for samples with penalties.
        bias: Sample -> {token id: value}.
        allowed: Sample -> allowed token ids, for constrained samples.
        fields: Any per-sample field of `SamplingInput`.
    """
    arrays = {
        name: np.array(np.broadcast_to(np.asarray(fields.pop(name, default), dtype), num_samples))
        for name, (dtype, default) in _DEFAULTS.items()
    }
    assert not fields, fields
    histories = [list((history or {}).get(row, ())) for row in range(num_samples)]
    biases = [dict((bias or {}).get(row, {})) for row in range(num_samples)]
    words = [_words((allowed or {}).get(row, ())) for row in range(num_samples)]
    return SamplingInput(
        **arrays,
        history_offsets=_offsets(histories),
        history_token_ids=np.array([token_id for entry in histories for token_id in entry], np.int32),
        bias_offsets=_offsets(biases),
        bias_token_ids=np.array([token_id for entry in biases for token_id in entry], np.int32),
        bias_values=np.array([value for entry in biases for value in entry.values()], np.float32),
        allowed_offsets=_offsets(words),
        allowed_words=np.array([word for entry in words for word in entry], np.uint32).view(np.int32),
    )


def _words(token_ids):
    words = [0] * (max(token_ids, default=-32) // 32 + 1)
    for token_id in token_ids:
        words[token_id // 32] |= 1 << token_id % 32
    return words


def block_moves(*moves):
    """Return moves [N, 6] (kind, source, target, source epoch, target epoch, number of tokens); missing values: 0."""
    width = len(BlockMove._fields)
    return np.array([(*move, *(0,) * (width - len(move))) for move in moves], np.int32).reshape(-1, width)


def scoring_input(*results):
    """Return the scoring input of results (token ids, number of most likely tokens)."""
    return ScoringInput(
        num_logprobs=np.array([count for _, count in results], np.int32),
        offsets=_offsets([token_ids for token_ids, _ in results]),
        token_ids=np.array([token_id for token_ids, _ in results for token_id in token_ids], np.int32),
    )


def top_tokens(results):
    """Return top tokens of results (token ids, their log-probabilities), most likely first."""
    return TopTokens(
        offsets=_offsets([token_ids for token_ids, _ in results]),
        token_ids=np.array([token_id for token_ids, _ in results for token_id in token_ids], np.int32),
        logprobs=np.array([logprob for _, logprobs in results for logprob in logprobs], np.float32),
    )


def step_input(rows, step=0, samples=None, sampling=None, moves=(), epochs=None, scores=(), vectors=(), adapters=()):
    """Return a step of rows (token_ids, num_computed, block_ids).

    Args:
        rows: One triple for each request.
        step: Number of the step.
        samples: Rows that sample; None: all rows.
        sampling: Sampling input; None: greedy.
        moves: Arguments of `block_moves`.
        epochs: [B, W] of the blocks; None: 0, so that all blocks have one owner.
        scores: Results (row, token, token ids, number of most likely tokens) of kind LOGPROBS, in order.
        vectors: Results (row, token) of kind VECTOR, in order.
        adapters: (number, slot) of each row's adapter; empty: no row has one.
    """
    width = max(len(blocks) for _, _, blocks in rows)
    block_tables = np.array([list(blocks) + [0] * (width - len(blocks)) for _, _, blocks in rows], np.int32)
    sample_rows = range(len(rows)) if samples is None else samples
    result_tokens = [
        *(ResultToken(row, len(rows[row][0]) - 1, ResultKind.TOKEN) for row in sample_rows),
        *(ResultToken(row, token, ResultKind.LOGPROBS) for row, token, _, _ in scores),
        *(ResultToken(row, token, ResultKind.VECTOR) for row, token in vectors),
    ]
    return StepInput(
        step=step,
        token_ids=np.array([token_id for token_ids, _, _ in rows for token_id in token_ids], np.int32),
        query_lens=np.array([len(token_ids) for token_ids, _, _ in rows], np.int32),
        num_computed=np.array([num_computed for _, num_computed, _ in rows], np.int32),
        block_tables=block_tables,
        block_epochs=np.zeros_like(block_tables) if epochs is None else np.array(epochs, np.int32),
        result_tokens=np.array(result_tokens, np.int32).reshape(-1, len(ResultToken._fields)),
        sampling=sampling or sampling_input(len(sample_rows)),
        scoring=scoring_input(*(result for _, _, *result in scores)),
        block_moves=block_moves(*moves),
        adapters=np.array(adapters, np.int32).reshape(-1, 2),
    )


def select_samples(sampling, rows):
    """Return the sampling input of some samples, in the order of `rows`."""
    fields = {name: getattr(sampling, name)[rows] for name in _DEFAULTS}
    histories = [_part(sampling.history_token_ids, sampling.history_offsets, row) for row in rows]
    bias_ids = [_part(sampling.bias_token_ids, sampling.bias_offsets, row) for row in rows]
    words = [_part(sampling.allowed_words, sampling.allowed_offsets, row) for row in rows]
    bias_values = [_part(sampling.bias_values, sampling.bias_offsets, row) for row in rows]
    return SamplingInput(
        **fields,
        history_offsets=_offsets(histories),
        history_token_ids=np.concatenate(histories),
        bias_offsets=_offsets(bias_ids),
        bias_token_ids=np.concatenate(bias_ids),
        bias_values=np.concatenate(bias_values),
        allowed_offsets=_offsets(words),
        allowed_words=np.concatenate(words),
    )


def _part(values, offsets, row):
    return values[offsets[row] : offsets[row + 1]]


def _offsets(parts):
    return np.array(list(accumulate(map(len, parts), initial=0)), np.int32)
