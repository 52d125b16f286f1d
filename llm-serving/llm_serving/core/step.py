"""The contract of master and WorkAgent: what one step computes and what comes back.

A step is self-contained. It names, for each row (one request), the tokens to run, how many tokens of context are in the
cache already and which blocks hold them; the WorkAgent derives positions, slots and context lengths and remembers
nothing but the key/value cache and the tokens of its latest step.

A step also names the tokens that give a result, and of which kind; all others only fill the cache. The reply has one
result for each of them, as long as its kind makes it.

What a draft model is asked for, between two steps: how it would go on with what has been said.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]


NO_BLOCK: Final = -1
"""Stands in a block table where no token of the step sees what was there: the block was given back, or never taken."""


class BlockMoveKind(enum.IntEnum):
    """What a block move does with whole blocks of the key/value cache, all layers."""

    COPY = 0
    """From one block of the cache to another."""
    SWAP_OUT = 1
    """From a block of the cache to a block of the host pool."""
    SWAP_IN = 2
    """From a block of the host pool to a block of the cache."""
    EXPORT = 3
    """From a block of the cache to a block of the transfer pool, which other WorkAgents read."""
    IMPORT = 4
    """From a block of the transfer pool, whoever wrote it, to a block of the cache."""


class BlockMove(NamedTuple):
    """A block move: what one block holds goes to another one, whose tokens and owner are those named here from then on.

    An epoch says in which hands a block was when it was written, see `kvcache.block_table`.
    """

    kind: int
    """A `BlockMove`."""
    source: int
    target: int
    source_epoch: int
    target_epoch: int
    num_tokens: int
    """So many of the block's first tokens count; what may stand behind them does not."""


def no_block_moves() -> Int32Array:
    return np.empty((0, len(BlockMove._fields)), np.int32)


class ResultKind(enum.IntEnum):
    """What a token of a step gives."""

    TOKEN = 0
    """The token that follows it, chosen as `SamplingInput` says."""
    LOGPROBS = 1
    """Log-probabilities of what may follow it, of the tokens that `ScoringInput` names and of the most likely ones."""
    VECTOR = 2
    """Its last hidden state, as the head would read it."""


class Wanted(NamedTuple):
    """A result of a step."""

    row: int
    token: int
    """Which of the tokens that the row runs in this step, from 0."""
    kind: int
    """A `ResultKind`."""


def reference_to_previous_step(sample: int) -> int:
    """The token id that stands for "whatever sample `sample` of the step before this one chose"."""
    return -1 - sample


class AllowedTokens(NamedTuple):
    """Which tokens each of S samples may choose; a ragged list."""

    offsets: Int32Array
    """[S + 1] into words; empty parts for samples that may choose any token."""
    words: Int32Array
    """A bit a token, lowest first: token i is bit i % 32 of word i // 32; beyond the last: 0."""


def all_tokens_allowed(num_samples: int) -> AllowedTokens:
    """All samples may choose whatever they like."""
    return AllowedTokens(np.zeros(num_samples + 1, np.int32), np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """How to choose a token for each of S samples; ragged lists are cut by their offsets."""

    temperature: Float32Array  # [S], 0 is greedy
    top_k: Int32Array  # [S], 0 is off
    top_p: Float32Array  # [S], 1 is off
    min_p: Float32Array  # [S], 0 is off
    repetition_penalty: Float32Array  # [S], 1 is off
    presence_penalty: Float32Array  # [S]
    frequency_penalty: Float32Array  # [S]
    seed: NDArray[np.uint64]  # [S]
    position: Int32Array  # [S], index in its sequence of the token to choose: the counter of the random numbers
    num_logprobs: Int32Array  # [S], -1 none, n: the chosen token's and the n most likely
    history_offsets: Int32Array  # [S + 1] into history_token_ids; empty for samples without penalties
    history_token_ids: Int32Array  # prompt, then output; may end in a reference to the previous step
    history_prompt_lens: Int32Array  # [S], how many of them are prompt
    bias_offsets: Int32Array  # [S + 1] into the two lists below
    bias_token_ids: Int32Array
    bias_values: Float32Array  # added to the logits; -inf forbids
    allowed_offsets: Int32Array  # [S + 1] into allowed_words; the two are an `AllowedTokens`
    allowed_words: Int32Array

    @classmethod
    def greedy(
        cls,
        num_samples: int,
        *,
        temperature: Float32Array | None = None,
        top_k: Int32Array | None = None,
        top_p: Float32Array | None = None,
        min_p: Float32Array | None = None,
        seed: NDArray[np.uint64] | None = None,
        position: Int32Array | None = None,
        num_logprobs: Int32Array | None = None,
    ) -> SamplingInput:
        """Without penalties, biases and forbidden tokens; greedy, without log-probabilities, where nothing is given."""
        zeros, ones = np.zeros(num_samples, np.float32), np.ones(num_samples, np.float32)
        whole, offsets = np.zeros(num_samples, np.int32), np.zeros(num_samples + 1, np.int32)
        nothing = np.empty(0, np.int32)
        return cls(
            temperature=zeros if temperature is None else temperature,
            top_k=whole if top_k is None else top_k,
            top_p=ones if top_p is None else top_p,
            min_p=zeros if min_p is None else min_p,
            repetition_penalty=ones,
            presence_penalty=zeros,
            frequency_penalty=zeros,
            seed=np.zeros(num_samples, np.uint64) if seed is None else seed,
            position=whole if position is None else position,
            num_logprobs=np.full(num_samples, -1, np.int32) if num_logprobs is None else num_logprobs,
            history_offsets=offsets,
            history_token_ids=nothing,
            history_prompt_lens=whole,
            bias_offsets=offsets,
            bias_token_ids=nothing,
            bias_values=np.empty(0, np.float32),
            allowed_offsets=offsets,
            allowed_words=nothing,
        )

    @property
    def num_samples(self) -> int:
        return len(self.temperature)

    def with_allowed_tokens(self, allowed: AllowedTokens) -> SamplingInput:
        """The same with other allowed tokens."""
        return replace(self, allowed_offsets=allowed.offsets, allowed_words=allowed.words)


SAMPLING_DTYPES: Final[Mapping[str, type[np.generic]]] = {
    name: get_args(get_args(hint)[1])[0] for name, hint in get_type_hints(SamplingInput).items()
}
"""Field of `SamplingInput` -> type of its numbers, in the order of the fields."""
SAMPLE_FIELDS: Final = tuple(
    name for name in SAMPLING_DTYPES if not name.endswith(("_offsets", "_token_ids", "_values", "_words"))
)
"""Those with one number for each sample; the others are ragged lists."""


@dataclass(frozen=True, slots=True)
class ScoringInput:
    """Of which tokens P results of kind LOGPROBS tell the log-probability: of G named ones and of the most likely."""

    num_logprobs: Int32Array  # [P], so many of the most likely; 0: none
    offsets: Int32Array  # [P + 1] into token_ids
    token_ids: Int32Array  # [G]

    @property
    def num_results(self) -> int:
        return len(self.num_logprobs)


def no_scoring() -> ScoringInput:
    return ScoringInput(np.empty(0, np.int32), np.zeros(1, np.int32), np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class StepInput:
    """One forward pass over B rows and T packed tokens, no padding.

    Row b runs `query_lens[b]` tokens that follow the `num_computed[b]` tokens already in the blocks of
    `block_tables[b]`, which has room for all of them.
    """

    step: int
    """Counts from 0 without gaps for each WorkAgent; the reply carries it back."""
    token_ids: Int32Array  # [T]; >= 0 a token, < 0 see `reference_to_previous_step`
    query_lens: Int32Array  # [B], each at least 1, sum T
    num_computed: Int32Array  # [B]
    block_tables: Int32Array  # [B, W] block ids; columns past a row's need are 0, those behind its window NO_BLOCK
    block_epochs: Int32Array  # [B, W], for each entry of block_tables the epoch of who wrote that block
    wanted: Int32Array  # [R, 3], each a `Wanted`; by kind, of a kind by row, of a row by token, all ascending
    sampling: SamplingInput  # of the S results of kind TOKEN
    scoring: ScoringInput = field(default_factory=no_scoring)  # of the P results of kind LOGPROBS
    block_moves: Int32Array = field(default_factory=no_block_moves)
    """[N, 6], each row a `Move`, done one after the other before the tokens are computed."""
    exports: Int32Array = field(default_factory=no_block_moves)
    """[N, 6], each a `Move` of the kind EXPORT, done when the tokens are computed and before the reply."""
    allowed_follow: bool = False
    """Whether the tokens that its samples may choose are told while it is computed, in place of those of `sampling`:
    they may depend on what the step before it gives."""

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_vectors(self) -> int:
        """Results of kind VECTOR, of a step that does not contradict itself."""
        return len(self.wanted) - self.sampling.num_samples - self.scoring.num_results


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The most likely tokens of each of N results, as many as each wants and the vocabulary has."""

    offsets: Int32Array  # [N + 1] into the two lists below
    token_ids: Int32Array  # most likely first
    logprobs: Float32Array

    @property
    def num_results(self) -> int:
        return len(self.offsets) - 1

    def of(self, result: int) -> tuple[list[int], list[float]]:
        """Ids and log-probabilities of one result."""
        part = slice(self.offsets[result], self.offsets[result + 1])
        return self.token_ids[part].tolist(), self.logprobs[part].tolist()


def no_top_tokens(num_results: int) -> TopTokens:
    return TopTokens(np.zeros(num_results + 1, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))


@dataclass(frozen=True, slots=True)
class Scores:
    """P results of kind LOGPROBS: logarithms of the model's own distribution, before temperature and the like."""

    logprobs: Float32Array  # [G], of the tokens that `ScoringInput` names
    ranks: Int32Array  # [G], of the same: 1 is the most likely token; among equals the lower id comes first
    top: TopTokens  # of the P results


NO_SCORES: Final = Scores(np.empty(0, np.float32), np.empty(0, np.int32), no_top_tokens(0))
NO_VECTORS: Final[Float32Array] = np.empty((0, 0), np.float32)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of one step, those of a kind in the order of its `wanted`."""

    step: int
    token_ids: Int32Array  # [S]
    logprobs: Float32Array  # [S]; meaningful where num_logprobs >= 0
    top: TopTokens  # of the S choices; none where num_logprobs is below 1 or no token could be chosen
    row_errors: dict[int, str] = field(default_factory=dict)
    """Results that cannot be given (all logits NaN, say), by index in `wanted`, and why; the token id of one is -1.

    Of results of the same row and kind the first is named alone.
    """
    scores: Scores = NO_SCORES
    vectors: Float32Array = field(default_factory=lambda: NO_VECTORS)  # [results of kind VECTOR, hidden size]


WINDOW: Final = 256
"""Most tokens of a request that a draft model sees. When there are more, the older half is forgotten at once, so that
what it has computed of the others is good for the next 128."""
MAX_CONTINUATIONS: Final = 16
"""Most requests it goes on with at a time."""
MAX_COUNT: Final = 64
"""Most tokens by which it goes on."""
MAX_PROPOSED_TOKENS: Final = 1024
"""Most tokens that a draft model computes at once; whoever's text does not fit any more is not gone on with then."""


class Continuation(NamedTuple):
    """A request to go on with, and how its tokens are chosen."""

    key: int
    """Of the request; what was computed for the same key before is used again as far as the tokens are the same."""
    start: int
    """Index in the request of the first of `token_ids`."""
    token_ids: list[int]
    """Its newest tokens, at most `WINDOW`."""
    num_wanted: int
    """By how many tokens to go on, at most `MAX_COUNT`."""
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


class DraftModelClient(Protocol):
    """Goes on with texts; what it says only decides how many tokens a step brings."""

    def propose(self, continuations: Sequence[Continuation]) -> list[list[int]]:
        """For each what may follow, at most `num_wanted` tokens."""


def blocks_of_continuation(block_size: int) -> int:
    """Blocks that a draft model's cache has for each of `MAX_CONTINUATIONS`."""
    return -(-(WINDOW + MAX_COUNT) // block_size)


def window_start(num_tokens: int) -> int:
    """Index of the first of so many tokens that a draft model sees."""
    half = WINDOW // 2
    return 0 if num_tokens <= WINDOW else ((num_tokens - 1) // half - 1) * half
