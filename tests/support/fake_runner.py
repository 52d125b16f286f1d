"""A model without arithmetic: its cache contains token ids, and its next token is a hash of the context in the cache.

It reads and writes only through block tables, as a real model does. So a block that two requests share by mistake, a
token computed twice or not at all, or a step out of order changes the answer. With a window it reads only the newest
tokens and the number of tokens before them. With several groups of layers, it reads the tokens from the tables of the
first group, and the answer changes if what another group sees differs from them.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from types import SimpleNamespace

import numpy as np
from llm_serving.core.fingerprint import UNKNOWN_FINGERPRINT
from llm_serving.core.step import (
    AllowedTokens,
    BlockMoveKind,
    Scores,
    ScoringInput,
    StepInput,
    StepOutput,
    TopTokens,
    no_top_tokens,
)
from llm_serving.core.window import NO_WINDOW, ONE_GROUP, CacheGroups, LayerWindow, Window
from llm_serving.errors import WorkerError
from llm_serving.worker import sampler
from llm_serving.worker.block_guard import SOURCE_AND_TARGET, BlockGuard, BlockLocation, BlockTags, StateGuard
from msgspec.structs import replace
from support.step_factories import top_tokens

VOCAB_SIZE = 1000
_EXPORTED_STATES: dict[int, tuple[int, ...]] = {}
"""What a block of a transfer pool has in place of a state -> the state."""
_LOGITS = 4 * np.random.default_rng(0).normal(size=1 << 18)
"""Logits of a context start at an offset in this array that depends on the context."""


class FakeTransferPool:
    def __init__(self, num_blocks: int) -> None:
        self.blocks: list[list[int]] = [[] for _ in range(num_blocks)]
        self.tags = BlockTags.of_empty(num_blocks)

    def read(self, block_ids: Sequence[int], epochs: Sequence[int]) -> tuple[list[int], bytes]:
        """Read blocks as `TransferMemory` does; a token has four bytes."""
        ids = list(block_ids)
        if self.tags.epochs[ids].tolist() != list(epochs):
            raise WorkerError("a block of the transfer pool belongs to another request")
        content = np.array([self.blocks[each] for each in ids], np.int32).tobytes()
        return self.tags.num_written[ids].tolist(), content

    def write(
        self, block_ids: Sequence[int], epochs: Sequence[int], num_written: Sequence[int], content: bytes
    ) -> None:
        ids = list(block_ids)
        given = np.frombuffer(content, np.int32).reshape(len(ids), -1).tolist()
        for each, tokens in zip(ids, given, strict=True):
            self.blocks[each] = tokens
        self.tags.epochs[ids], self.tags.num_written[ids] = epochs, num_written


class FakeRunner:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_swap_blocks: int = 0,
        groups: CacheGroups = ONE_GROUP,
        transfer: FakeTransferPool | None = None,
        num_state_slots: int = 0,
    ) -> None:
        """`num_state_slots`: if above 0, the model's state is the tokens so far, and its output depends on it."""
        self.num_blocks = num_blocks
        self.num_swap_blocks = num_swap_blocks
        self.block_size = block_size
        self.steps: list[StepInput] = []
        # Lists, because steps are small: a call into NumPy takes as long as a dozen tokens.
        self._cache = [[-1] * block_size for _ in range(num_blocks)]
        self._host = [[-1] * block_size for _ in range(num_swap_blocks)]
        self._groups = groups
        self.spec = SimpleNamespace(layout=SimpleNamespace(windows=(LayerWindow(),)))
        self.window = groups.windows[0].num_tokens
        transfer = FakeTransferPool(0) if transfer is None else transfer
        self._memories = {
            BlockLocation.CACHE: self._cache,
            BlockLocation.HOST: self._host,
            BlockLocation.TRANSFER: transfer.blocks,
        }
        self._state_guard = StateGuard(num_state_slots)
        sizes = num_blocks, num_swap_blocks, block_size
        self._guard = BlockGuard(*sizes, groups, transfer.tags, self._state_guard.tags)
        self._states: list[tuple[int, ...]] = [()] * num_state_slots
        self._previous: list[int] = []
        self.compute_fingerprint = UNKNOWN_FINGERPRINT

    def announce_ending(self, announce: Callable[[], None] | None) -> bool:
        return False

    def start(self, step: StepInput, await_allowed: Callable[[], AllowedTokens] | None = None) -> StepOutput:
        return self.execute(step, await_allowed)

    def execute(self, step: StepInput, await_allowed: Callable[[], AllowedTokens] | None = None) -> StepOutput:
        assert step.step == len(self.steps)
        if step.allowed_follow:
            assert await_allowed is not None
            step = replace(step, sampling=step.sampling.with_allowed_tokens(await_allowed()))
        self.steps.append(step)
        self._guard.move(step.block_moves)
        self._guard.check(step)
        self._move_blocks(step.block_moves.tolist())
        self._guard.check_imports(step.block_moves)
        contexts = self._contexts(step)
        if self._states:
            contexts = self._compared_with_states(step, contexts)
        assert self._states or not len(step.states)
        self._guard.start_exports(step.exports)
        self._move_blocks(step.exports.tolist())
        self._guard.finish_exports(step.exports)
        num_samples, num_scored = step.sampling.num_samples, step.scoring.num_results
        assert step.sampling.position.tolist() == [len(context) for context in contexts[:num_samples]]
        output = self._choose(step, contexts[:num_samples])
        self._previous = output.token_ids.tolist()
        if len(contexts) > num_samples:
            scores = _scores(contexts[num_samples : num_samples + num_scored], step.scoring)
            vectors = np.array([vector_of(context) for context in contexts[num_samples + num_scored :]], np.float32)
            output = replace(output, scores=scores, vectors=vectors)
        return output

    def _choose(self, step: StepInput, contexts: list[list[int]]) -> StepOutput:
        sampling = step.sampling
        tokens = [next_token(context, seed) for context, seed in zip(contexts, sampling.seed.tolist(), strict=True)]
        return StepOutput(step.step, np.array(tokens, np.int32), *_logprobs(contexts, tokens, sampling.num_logprobs))

    def _contexts(self, step: StepInput) -> list[list[int]]:
        """Write the tokens of a step, then return the context of each result, which includes its own token."""
        cache, block_size = self._cache, self.block_size
        given = iter(step.token_ids.tolist())
        tables, num_computed = step.block_tables.tolist(), step.num_computed.tolist()
        num_rows = len(num_computed)
        of_rows = [tables[row::num_rows] for row in range(num_rows)]
        for of_row, computed, query_len in zip(of_rows, num_computed, step.query_lens.tolist(), strict=True):
            assert computed + query_len <= len(of_row[0]) * block_size, "the block table is too short"
            for position in range(computed, computed + query_len):
                token_id = next(given)
                token_id = token_id if token_id >= 0 else self._previous[-1 - token_id]
                for table in of_row:
                    cache[table[position // block_size]][position % block_size] = token_id
        return [
            self._context(of_rows[row], num_computed[row] + token + 1) for row, token, _ in step.result_tokens.tolist()
        ]

    def _compared_with_states(self, step: StepInput, contexts: list[list[int]]) -> list[list[int]]:
        """Compute the states of a step. Return the contexts, changed where the state does not match."""
        state_in, state_out = self._state_guard.check(step)
        states, token_ids = [], iter(step.token_ids.tolist())
        for slot, query_len in zip(state_in.tolist(), step.query_lens.tolist(), strict=True):
            states.append([() if slot < 0 else self._states[slot]])
            for _ in range(query_len):
                token_id = next(token_ids)
                token_id = token_id if token_id >= 0 else self._previous[-1 - token_id]
                states[-1].append((*states[-1][-1], token_id))
        for state, slot in zip(chain.from_iterable(each[1:] for each in states), state_out.tolist(), strict=True):
            if slot >= 0:
                self._states[slot] = state
        of_results = [states[row][token + 1] for row, token, _ in step.result_tokens.tolist()]
        return [
            context if context == seen(list(state), self.window) else [-1, *context[1:]]
            for context, state in zip(contexts, of_results, strict=True)
        ]

    def _context(self, tables: list[list[int]], end: int) -> list[int]:
        """Return the first `end` tokens of a row with these tables, changed where two groups differ."""
        first, token_ids = self._seen(tables[0], self._groups.windows[0], end)
        for table, window in zip(tables[1:], self._groups.windows[1:], strict=True):
            start, others = self._seen(table, window, end)
            if others != token_ids[start - first :]:
                return [0] * first + [-1, *token_ids[1:]]
        return [0] * first + token_ids

    def _seen(self, table: list[int], window: Window, end: int) -> tuple[int, list[int]]:
        """Return the position of the first token that the last one sees in a group, and the tokens from there on."""
        first, block_size = max(0, end - window.num_tokens), self.block_size
        if window.is_chunked:
            first = (end - 1) // window.num_tokens * window.num_tokens
        begin = first // block_size
        token_ids: list[int] = []
        for block_id in table[begin : -(-end // block_size)]:
            token_ids += self._cache[block_id]
        return first, token_ids[first - begin * block_size : end - begin * block_size]

    def _move_blocks(self, moves: list[list[int]]) -> None:
        for kind, source, target, *_ in moves:
            if kind == BlockMoveKind.EXPORT_STATE:
                key = zlib.crc32(repr(self._states[source]).encode()) >> 1
                _EXPORTED_STATES[key] = self._states[source]
                self._memories[BlockLocation.TRANSFER][target] = [key] * self.block_size
                continue
            if kind == BlockMoveKind.IMPORT_STATE:
                self._states[target] = _EXPORTED_STATES[self._memories[BlockLocation.TRANSFER][source][0]]
                continue
            out_of, into = (self._memories[each] for each in SOURCE_AND_TARGET[BlockMoveKind(kind)])
            assert 0 <= source < len(out_of), (kind, source, target)
            assert 0 <= target < len(into), (kind, source, target)
            into[target] = out_of[source].copy()


class SamplingRunner(FakeRunner):
    """Samples as a WorkAgent does, with its checks and its NumPy sampler, from logits that depend on the context."""

    scale = 1.0
    """Factor of the logits."""

    def _choose(self, step: StepInput, contexts: list[list[int]]) -> StepOutput:
        sampler.check_sampling(step.sampling, VOCAB_SIZE)
        logits = np.array([self.scale * next_logprobs(context) for context in contexts], np.float32)
        previous = np.array(self._previous, np.int32)
        return sampler.sample(step.step, logits.reshape(-1, VOCAB_SIZE), step.sampling, previous)


def _logprobs(
    contexts: list[list[int]], token_ids: list[int], num_logprobs: np.ndarray
) -> tuple[np.ndarray, TopTokens]:
    """Return the log-probabilities of the chosen tokens [S], then the most likely tokens and theirs."""
    if max(num_logprobs.tolist(), default=-1) < 0:
        return np.zeros(len(contexts), np.float32), no_top_tokens(len(contexts))
    logprobs, tops = np.zeros(len(contexts), np.float32), [([], []) for _ in contexts]
    for sample, count in enumerate(num_logprobs.tolist()):
        if count >= 0:
            distribution, ranked = next_logprobs(contexts[sample]), most_likely(contexts[sample])[:count]
            logprobs[sample] = distribution[token_ids[sample]]
            tops[sample] = ranked.tolist(), distribution[ranked].tolist()
    return logprobs, top_tokens(tops)


POISON_LOGPROB = -99.0
"""Log-probability of the token above the vocabulary."""


def seen(token_ids: list[int], window: int) -> list[int]:
    """Return the part of a context that a model with a window distinguishes."""
    first = max(0, len(token_ids) - window)
    return [0] * first + token_ids[first:]


def _scores(contexts: list[list[int]], scoring: ScoringInput) -> Scores:
    logprobs, ranks, tops = [], [], []
    for result, (context, count) in enumerate(zip(contexts, scoring.num_logprobs.tolist(), strict=True)):
        # One token above the vocabulary is valid, for tests that need a prompt which cannot be computed.
        distribution, ranked = (
            np.append(next_logprobs(context), POISON_LOGPROB),
            np.append(most_likely(context), VOCAB_SIZE),
        )
        given = scoring.token_ids[scoring.offsets[result] : scoring.offsets[result + 1]]
        logprobs += distribution[given].tolist()
        ranks += [ranked.tolist().index(token_id) + 1 for token_id in given.tolist()]
        tops.append((ranked[:count].tolist(), distribution[ranked[:count]].tolist()))
    return Scores(np.array(logprobs, np.float32), np.array(ranks, np.int32), top_tokens(tops))


def vector_of(token_ids: list[int]) -> np.ndarray:
    """Return the fake model's last hidden state [8] after `token_ids`."""
    return next_logprobs(token_ids)[:8]


def next_token(token_ids: list[int], seed: int) -> int:
    """Return the fake model's token after `token_ids`."""
    return zlib.crc32(array("q", [seed % 2**63, *token_ids]).tobytes()) % VOCAB_SIZE


def next_logprobs(token_ids: list[int]) -> np.ndarray:
    """Return log-probabilities [VOCAB_SIZE] after `token_ids`; `next_token` does not depend on them."""
    return _distribution(tuple(token_ids))[0]


def most_likely(token_ids: list[int]) -> np.ndarray:
    """Return all tokens [VOCAB_SIZE] by `next_logprobs`, highest first."""
    return _distribution(tuple(token_ids))[1]


@lru_cache(maxsize=8192)
def _distribution(token_ids: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    begin = zlib.crc32(array("q", token_ids).tobytes()) % (len(_LOGITS) - VOCAB_SIZE)
    logits = _LOGITS[begin : begin + VOCAB_SIZE]
    logprobs = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
    ranked = np.argsort(-logprobs, kind="stable")
    logprobs.flags.writeable = ranked.flags.writeable = False
    return logprobs, ranked


def expected_output(prompt_token_ids: list[int], count: int, seed: int = 0, window: int = NO_WINDOW) -> list[int]:
    """Return the fake model's answer of `count` tokens, computed without a cache."""
    token_ids = list(prompt_token_ids)
    for _ in range(count):
        token_ids.append(next_token(seen(token_ids, window), seed))
    return token_ids[len(prompt_token_ids) :]
