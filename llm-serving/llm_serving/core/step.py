"""The interface between master and WorkAgent: input and output of a step, and of a draft model between two steps.

A row of a step belongs to one request. It lists the tokens to compute, the number of context tokens in the cache, the
blocks that hold them, and which tokens give a result. A WorkAgent keeps only the KV cache and its latest step's tokens.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, get_args, get_type_hints

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]


NO_BLOCK: Final = -1
"""Entry of a block table without a block, because the sliding window has passed it."""


class BlockMoveKind(enum.IntEnum):
    COPY = 0
    SWAP_OUT = 1
    SWAP_IN = 2
    EXPORT = 3
    """From the KV cache to the transfer pool, which other WorkAgents read."""
    IMPORT = 4
    EXPORT_STATE = 5
    """From a state slot to the transfer pool: one piece of the state, of the size of a block, in order."""
    IMPORT_STATE = 6


class BlockMove(NamedTuple):
    """A copy of a block to another, in all layers. Epochs number a block's allocations (`kvcache.block_table`)."""

    kind: int
    source: int
    target: int
    source_epoch: int
    target_epoch: int
    num_tokens: int
    """Number of valid tokens in the block. For a state: number of tokens that the state covers."""


NO_BLOCK_MOVES: Final[Int32Array] = np.empty((0, len(BlockMove._fields)), np.int32)


STATE_BEFORE: Final = -1


class StateAccess(NamedTuple):
    row: int
    token: int
    """Index, in the row, of the token after which the slot is written, or `STATE_BEFORE` if the slot is read."""
    slot: int
    epoch: int
    """Number of the slot's allocation. It shows the WorkAgent whether the slot was allocated again."""


NO_STATE_ACCESSES: Final[Int32Array] = np.empty((0, len(StateAccess._fields)), np.int32)
NO_ADAPTERS: Final[Int32Array] = np.empty((0, 2), np.int32)


class ResultKind(enum.IntEnum):
    TOKEN = 0
    LOGPROBS = 1
    """Log-probabilities of the next token, for the tokens in `ScoringInput` and the most likely ones."""
    VECTOR = 2
    """Hidden state that is the input of the LM head, or the scores that a classifier computes from it."""
    MEAN = 3
    """Like VECTOR, from the mean of the row's hidden states up to and including the token."""


class ResultToken(NamedTuple):
    """The token of a request after which a step returns a result, such as a sample. `row`: index of the request in
    the step. `token`: index among its tokens in the step.
    """

    row: int
    token: int
    kind: int


def reference_to_previous_step(sample: int) -> int:
    return -1 - sample


class AllowedTokens(NamedTuple):
    """The tokens that may be sampled: a bit mask for each of S samples."""

    offsets: Int32Array
    """[S + 1] offsets of the masks in `words`. An empty mask allows all tokens."""
    words: Int32Array
    """Token i is bit i % 32 of word i // 32 of a mask. Bits after the last token are 0."""


def all_tokens_allowed(num_samples: int) -> AllowedTokens:
    return AllowedTokens(np.zeros(num_samples + 1, np.int32), np.empty(0, np.int32))


class SamplingInput(Struct, frozen=True, gc=False):
    """Sampling parameters of S samples. Lists such as biases are concatenated: the elements from `offsets[s]` to
    `offsets[s + 1]` belong to sample s.
    """

    temperature: Float32Array  # [S], 0 is greedy
    top_k: Int32Array  # [S], 0 is off
    top_p: Float32Array  # [S], 1 is off
    min_p: Float32Array  # [S], 0 is off
    typical_p: Float32Array  # [S], 1 is off
    repetition_penalty: Float32Array  # [S], 1 is off
    presence_penalty: Float32Array  # [S]
    frequency_penalty: Float32Array  # [S]
    seed: NDArray[np.uint64]  # [S]
    position: Int32Array  # [S], index of the sampled token in its sequence: the counter of the random numbers
    num_logprobs: Int32Array  # [S], -1 none, n: the chosen token's and the n most likely
    history_offsets: Int32Array  # [S + 1] into history_token_ids; empty for samples without penalties
    history_token_ids: Int32Array  # prompt, then output; may end in a reference to the previous step
    history_prompt_lens: Int32Array  # [S], number of prompt tokens among them
    bias_offsets: Int32Array  # [S + 1] into the two lists below
    bias_token_ids: Int32Array
    bias_values: Float32Array  # added to the logits; -inf forbids
    allowed_offsets: Int32Array  # [S + 1] into allowed_words; the two are an `AllowedTokens`
    allowed_words: Int32Array

    @classmethod
    def plain(cls, num_samples: int, **given: NDArray[Any]) -> SamplingInput:
        """Return `given` and defaults for the other fields: greedy, no penalties, biases and constraints."""
        zeros, ones = np.zeros(num_samples, np.float32), np.ones(num_samples, np.float32)
        whole, offsets = np.zeros(num_samples, np.int32), np.zeros(num_samples + 1, np.int32)
        nothing = np.empty(0, np.int32)
        values: dict[str, Any] = {
            "temperature": zeros,
            "top_k": whole,
            "top_p": ones,
            "min_p": zeros,
            "typical_p": ones,
            "repetition_penalty": ones,
            "presence_penalty": zeros,
            "frequency_penalty": zeros,
            "seed": np.zeros(num_samples, np.uint64),
            "position": whole,
            "num_logprobs": np.full(num_samples, -1, np.int32),
            "history_offsets": offsets,
            "history_token_ids": nothing,
            "history_prompt_lens": whole,
            "bias_offsets": offsets,
            "bias_token_ids": nothing,
            "bias_values": np.empty(0, np.float32),
            "allowed_offsets": offsets,
            "allowed_words": nothing,
        }
        return cls(**{**values, **given})

    @property
    def num_samples(self) -> int:
        return len(self.temperature)

    def with_allowed_tokens(self, allowed: AllowedTokens) -> SamplingInput:
        return replace(self, allowed_offsets=allowed.offsets, allowed_words=allowed.words)


SAMPLING_DTYPES: Final[Mapping[str, type[np.generic]]] = {
    name: get_args(get_args(hint)[1])[0] for name, hint in get_type_hints(SamplingInput).items()
}
SAMPLE_FIELDS: Final = tuple(
    name for name in SAMPLING_DTYPES if not name.endswith(("_offsets", "_token_ids", "_values", "_words"))
)
"""Fields with one number for each sample. The others are concatenated lists."""


class ScoringInput(Struct, frozen=True, gc=False):
    """The tokens whose log-probabilities a step returns. `token_ids` concatenates one list of tokens per result."""

    num_logprobs: Int32Array  # [P], number of most likely tokens
    offsets: Int32Array  # [P + 1] into token_ids
    token_ids: Int32Array  # [G]

    @property
    def num_results(self) -> int:
        return len(self.num_logprobs)


NO_SCORING: Final = ScoringInput(np.empty(0, np.int32), np.zeros(1, np.int32), np.empty(0, np.int32))


class StepInput(Struct, frozen=True, gc=False):
    """One forward pass over B rows and T packed tokens, without padding.

    Row b computes `query_lens[b]` tokens after the `num_computed[b]` tokens in the blocks of `block_tables[b]`. With G
    groups of layers (`core.window`), row b has one table in each group: `block_tables[g * B + b]`.
    """

    step: int
    """Number of the step on this WorkAgent, from 0 without gaps."""
    token_ids: Int32Array  # [T]; >= 0 a token, < 0 see `reference_to_previous_step`
    query_lens: Int32Array  # [B], each at least 1, sum T
    num_computed: Int32Array  # [B]
    block_tables: Int32Array
    """[G * B, W] block ids, first group of layers first. Columns before the window are NO_BLOCK, unused ones 0."""
    block_epochs: Int32Array  # [G * B, W], for each entry of block_tables the epoch of its block
    result_tokens: Int32Array  # [R, 3], each a `ResultToken`; sorted by kind, row, token
    sampling: SamplingInput  # for the S results of kind TOKEN
    scoring: ScoringInput = NO_SCORING  # for the P results of kind LOGPROBS
    block_moves: Int32Array = NO_BLOCK_MOVES
    """[N, 6], each row a `BlockMove`. They are executed in order before the tokens are computed."""
    exports: Int32Array = NO_BLOCK_MOVES
    """[N, 6], each row a `BlockMove` of kind EXPORT, executed between the computation and the reply."""
    states: Int32Array = NO_STATE_ACCESSES
    adapters: Int32Array = NO_ADAPTERS
    """[B, 2], adapter (0: none) and slot of each row, or empty. A slot with another adapter is filled beforehand."""
    allowed_follow: bool = False
    """Whether the master sends the allowed tokens during the step, because they may depend on the previous reply."""

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class TopTokens(Struct, frozen=True, gc=False):
    offsets: Int32Array  # [N + 1] into the two lists below
    token_ids: Int32Array  # most likely first
    logprobs: Float32Array

    @property
    def num_results(self) -> int:
        return len(self.offsets) - 1

    def of(self, result: int) -> tuple[list[int], list[float]]:
        part = slice(self.offsets[result], self.offsets[result + 1])
        return self.token_ids[part].tolist(), self.logprobs[part].tolist()


def no_top_tokens(num_results: int) -> TopTokens:
    return TopTokens(np.zeros(num_results + 1, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))


class Scores(Struct, frozen=True, gc=False):
    """Log-probabilities of the tokens in `ScoringInput`, before temperature and other sampling parameters apply."""

    logprobs: Float32Array  # [G], of the tokens in `ScoringInput`
    ranks: Int32Array  # [G], of the same tokens: 1 is the most likely; of equals the lower id comes first
    top: TopTokens  # of the P results


NO_SCORES: Final = Scores(np.empty(0, np.float32), np.empty(0, np.int32), no_top_tokens(0))
NO_VECTORS: Final[Float32Array] = np.empty((0, 0), np.float32)


class StepOutput(Struct, frozen=True, gc=False):
    """The results of one step. Results of one kind are in the order of `StepInput.result_tokens`."""

    step: int
    token_ids: Int32Array  # [S]
    logprobs: Float32Array  # [S]; meaningful where num_logprobs >= 0
    top: TopTokens  # of the S samples; none if num_logprobs is below 1 or no token could be chosen
    row_errors: dict[int, str] = {}
    """Index in `result_tokens` -> why this result is missing (token -1); the first of each row and kind only."""
    scores: Scores = NO_SCORES
    vectors: Float32Array = NO_VECTORS  # [results of kinds VECTOR and MEAN, hidden size or labels]


DRAFT_WINDOW: Final = 256
"""Maximum number of latest tokens that a draft model reads. Half of them are dropped at a time, to reuse KV."""
MAX_DRAFT_REQUESTS: Final = 16
MAX_DRAFT_TOKENS: Final = 64
MAX_PROPOSED_TOKENS: Final = 1024
"""Maximum number of tokens that a draft model computes at a time. Further requests get no draft tokens."""


class DraftRequest(NamedTuple):
    """A request for which a draft model proposes tokens. `start`: index of the first of `token_ids` in the request."""

    key: int
    """Number of the request. The draft model reuses its KV while its tokens are the same."""
    start: int
    token_ids: list[int]
    num_draft_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    block_ids: list[int] = []  # noqa: RUF012
    """KV blocks of `token_ids` in the served model's cache, if the proposer needs their hidden states."""


class DraftModelClient(Protocol):
    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]: ...


def blocks_per_draft_request(block_size: int) -> int:
    return -(-(DRAFT_WINDOW + MAX_DRAFT_TOKENS) // block_size)


def draft_window_start(num_tokens: int) -> int:
    half = DRAFT_WINDOW // 2
    return 0 if num_tokens <= DRAFT_WINDOW else ((num_tokens - 1) // half - 1) * half
