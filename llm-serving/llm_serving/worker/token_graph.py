"""Runs the graph of steps in which each row has one token, such as decode steps. If the backend's attention computes
each token as a row of its own (`attention_rows`), this graph computes all steps.

The device chooses the tokens unless `choice_of` says that the host must sample. The device computes a step while the
host prepares the next one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import mindspore as ms
import numpy as np
from numpy.typing import NDArray

from llm_serving.backends.base import Backend
from llm_serving.backends.parameters import is_on_npu
from llm_serving.backends.token_drawing import (
    LEAST_FLOAT,
    MAX_DRAWN_VOCAB,
    NUM_CANDIDATES,
    NUM_PARAMETERS,
    NUM_PIECES,
    PIECE_BITS,
    split_floats,
)
from llm_serving.core.step import Float32Array, Int32Array, SamplingInput, StepOutput
from llm_serving.log import get_logger
from llm_serving.lowering.step_inputs import NUM_TOKEN_ARRAYS, NUM_TOKEN_COLUMNS
from llm_serving.worker.compiled_graph import CompiledNetwork
from llm_serving.worker.logprobs import weight_scales
from llm_serving.worker.model_inputs import NO_TOKENS, ModelInputs, all_true
from llm_serving.worker.sampler import ChooseTokens, greedy_samples, uses_logits_unchanged
from llm_serving.worker.sampling_reference import uniform

logger = get_logger(__name__)

_SMALLEST_SHARE = np.float32(2**-20)
"""Minimum `top_p` for the device. A smaller one has the same result: the largest weight, 1, exceeds this share of the
total of up to 2^18 weights."""
_NUM_CHECKED = 64


class TokenChoice(enum.Enum):
    HOST = "the host samples"
    GREEDY = "the device returns the most likely tokens"
    ALL = "the device draws among all tokens"
    LARGEST = "some rows have top_k up to `NUM_CANDIDATES`"
    SORTED = "some rows have another top_k, or top_p alone"


NUM_SORTED: Final[Mapping[TokenChoice, int]] = {
    TokenChoice.ALL: 0,
    TokenChoice.LARGEST: NUM_CANDIDATES,
    TokenChoice.SORTED: MAX_DRAWN_VOCAB,
}
"""How tokens are drawn -> the number of candidates of `TokenDrawing`."""


class HostCopy:
    """A copy of a tensor to the host. Waiting for it does not include work that was submitted to the device later."""

    def __init__(self, tensor: ms.Tensor) -> None:
        self._event: ms.runtime.Event | None = None
        if is_on_npu():
            tensor = tensor.to("CPU", non_blocking=True)
            self._event = ms.runtime.Event()
            self._event.record()
        self._tensor = tensor

    @property
    def is_done(self) -> bool:
        return self._event is None or bool(self._event.query())

    def array(self) -> NDArray[Any]:
        if self._event is not None:
            self._event.synchronize()
        copied: NDArray[Any] = self._tensor.asnumpy()
        return copied


class StartedStep:
    def __init__(
        self,
        copy: HostCopy,
        finish: Callable[[NDArray[Any]], StepOutput],
        num_samples: int,
        *,
        keeps_tokens: bool = False,
    ) -> None:
        """`finish` makes the output of the step from the array that `copy` brings to the host."""
        self._pending: tuple[HostCopy, Callable[[NDArray[Any]], StepOutput]] | None = (copy, finish)
        self.placeholders: Int32Array = np.zeros(num_samples, np.int32)
        """Valid token ids that stand for the samples until these are known."""
        self.keeps_tokens = keeps_tokens
        """Whether the token graph keeps the samples on the device for the next step."""
        self._output: StepOutput | None = None

    @property
    def is_done(self) -> bool:
        """Whether `output` would return without waiting for the device."""
        return self._pending is None or self._pending[0].is_done

    def output(self) -> StepOutput:
        """Wait for the step and return its results. Raise errors of the device and of sampling."""
        if self._pending is not None:
            copy, finish = self._pending
            self._output = finish(copy.array())
            self._pending = None  # frees the previous step and device memory
        assert self._output is not None
        return self._output


class DeviceLogits(NamedTuple):
    """Logits [S, V], float32, in the memory of the device, which computes them while the host continues. `largest` is
    the second result of `Backend.largest_logits`. `parameters`, int32 [S, 15], says how `TokenDrawing` draws tokens on
    the device. Both are None if no `TokenGraph` computed the step.
    """

    logits: ms.Tensor
    largest: ms.Tensor | None = None
    parameters: ms.Tensor | None = None
    choice: TokenChoice = TokenChoice.HOST

    def copy(self) -> Float32Array:
        """Wait for the step. Return a copy of the logits on the host, [S, V]."""
        copied: Float32Array = self.logits.asnumpy()
        return copied


def tokens_of(chosen: Float32Array) -> Int32Array | None:
    """Return the tokens [S] that the device chose, or None if a logit is not finite and the host must report it."""
    ids, values = chosen.T
    return ids.astype(np.int32) if all_true(np.isfinite(values)) else None


def choice_of(sampling: SamplingInput) -> TokenChoice:
    """Return how the device chooses the tokens of a step, or `HOST` if the host must sample them."""
    if not uses_logits_unchanged(sampling):
        return TokenChoice.HOST
    greedy = greedy_samples(sampling)
    if all_true(greedy):
        return TokenChoice.GREEDY
    drawn = (sampling.typical_p == 1) & (weight_scales(sampling.temperature) >= LEAST_FLOAT)
    if not all_true(greedy | drawn):
        return TokenChoice.HOST
    all_tokens = (sampling.top_k == 0) & (sampling.top_p == 1)
    if all_true(greedy | all_tokens):
        return TokenChoice.ALL
    few = (sampling.top_k > 0) & (sampling.top_k <= NUM_CANDIDATES)
    return TokenChoice.LARGEST if all_true(greedy | all_tokens | few) else TokenChoice.SORTED


def drawing_parameters(sampling: SamplingInput) -> Int32Array:
    """Return how `TokenDrawing` draws each token on the device, int32 [S, 15]."""
    greedy = greedy_samples(sampling)
    top_k = np.where((sampling.top_k == 0) & (sampling.top_p < 1), MAX_DRAWN_VOCAB, sampling.top_k)
    scale, scale_power = split_floats(weight_scales(sampling.temperature))
    min_p, min_p_power = split_floats(sampling.min_p)
    parameters: Int32Array = np.column_stack(
        [
            np.arange(len(greedy)),
            greedy,
            np.where(greedy, 0, np.minimum(top_k, MAX_DRAWN_VOCAB)),
            *_pieces(uniform(sampling.seed, sampling.position)),
            *_pieces(np.maximum(sampling.top_p, _SMALLEST_SHARE)),
            scale,
            min_p,
            scale_power,
            min_p_power,
        ]
    ).astype(np.int32)
    return parameters


def _pieces(fractions: Any) -> list[Any]:
    """Divide fractions [S], multiples of 2^-53 from 0 to 1, into `NUM_PIECES` integers each, the highest bits first."""
    whole = np.ldexp(fractions.astype(np.float64), 53).astype(np.int64)
    return [whole >> PIECE_BITS * index & (1 << PIECE_BITS) - 1 for index in reversed(range(NUM_PIECES))]


class TokenGraph:
    """Runs a compiled `TokenNetwork` and the graphs that draw tokens. A run can read tokens of the run before."""

    def __init__(self, network: CompiledNetwork, backend: Backend, vocab_size: int) -> None:
        self._network = network
        self._attention_rows = backend.attention_rows
        self._vocab_size = vocab_size
        inputs = [
            ms.Tensor(shape=[None, vocab_size], dtype=ms.float32),
            ms.Tensor(shape=[None, 2], dtype=ms.float32),
            ms.Tensor(shape=[None, NUM_PARAMETERS], dtype=ms.int32),
        ]
        self._drawing = {
            choice: CompiledNetwork(cell, inputs, is_decode=True)
            for choice, num_candidates in NUM_SORTED.items()
            if vocab_size <= MAX_DRAWN_VOCAB and (cell := backend.token_drawing(vocab_size, num_candidates)) is not None
        }
        self._latest = ms.Tensor(np.zeros(1, np.int32))
        self._rows: tuple[int, ms.Tensor, ms.Tensor] | None = None

    @property
    def num_compilations(self) -> int:
        return self._network.num_compilations

    def computes(self, inputs: ModelInputs) -> bool:
        """Return whether the graph can compute a step: always if the backend's attention computes each token as a row
        of its own, otherwise if each request in the step has one token and one result.
        """
        return bool(self._attention_rows) or len(inputs.token_ids) == inputs.num_rows == len(inputs.sample_indices)

    def submit(
        self, inputs: ModelInputs, given_ids: Int32Array | None = None, sampling: SamplingInput | None = None
    ) -> DeviceLogits:
        """Start a step. If it has no results, return the logits of its first token, because some kernels need a row.
        `given_ids` are token ids with references (`core.step.reference_to_previous_step`) to tokens that the device
        chose in the latest run, or None if there are no references. If `sampling` is None, the host samples.
        """
        num_tokens, num_latest = len(inputs.token_ids), self._latest.shape[0]
        step = np.zeros((num_tokens, NUM_TOKEN_COLUMNS + inputs.block_tables.shape[1]), np.int32)
        step[:, 0], step[:, 1], step[:, 2] = inputs.token_ids, inputs.positions, inputs.slot_mapping
        # The source of each token: its index in the tokens of the latest run followed by those of this run.
        step[:, 3] = np.arange(num_latest, num_latest + num_tokens)
        if given_ids is not None:
            step[:, 3] = np.where(given_ids < 0, np.int32(-1) - given_ids, step[:, 3])
        choice = TokenChoice.HOST if sampling is None else self._choice(sampling)
        if sampling is not None and choice in self._drawing:
            step[inputs.sample_indices, NUM_TOKEN_ARRAYS:NUM_TOKEN_COLUMNS] = drawing_parameters(sampling)
        if self._attention_rows:
            arguments = self._arguments_of_rows(step, inputs)
        else:
            step[:, NUM_TOKEN_COLUMNS:] = inputs.block_tables
            arguments = step, self._latest, inputs.context_lens
        logits, self._latest, largest, parameters = self._network.submit(arguments)
        return DeviceLogits(logits, largest, parameters, choice)

    def _arguments_of_rows(self, step: Int32Array, inputs: ModelInputs) -> tuple[Any, ...]:
        step[:, NUM_TOKEN_COLUMNS:] = np.repeat(inputs.block_tables, inputs.query_lens, axis=0)
        rows = inputs.with_token_rows(self._attention_rows)
        table_rows, selected = self._rows_of(len(step), rows)
        return step, self._latest, rows.context_lens, rows.query_lens, table_rows, selected

    def _rows_of(self, num_tokens: int, rows: ModelInputs) -> tuple[Any, Any]:
        """Return the arguments `table_rows` and `sample_indices` of the graph for a step (see `TOKEN_ROW_INPUTS`). If
        every token is sampled, they depend only on the number of tokens, and stay on the device for later steps.
        """
        table_rows, selected = np.arange(rows.num_rows, dtype=np.int32), rows.selected_indices
        table_rows[num_tokens:] = 0
        if len(selected) < num_tokens:
            return table_rows, selected
        if self._rows is None or self._rows[0] != num_tokens:
            self._rows = num_tokens, self._network.on_device(table_rows), self._network.on_device(selected)
        return self._rows[1:]

    def _choice(self, sampling: SamplingInput) -> TokenChoice:
        choice = choice_of(sampling)
        return choice if choice in self._drawing or choice is TokenChoice.GREEDY else TokenChoice.HOST

    def choose(self, computed: DeviceLogits) -> ms.Tensor | None:
        """Start to choose a step's tokens. Return float32 [S, 2] for `tokens_of`, or None if the host must sample."""
        if computed.choice is TokenChoice.GREEDY:
            return computed.largest
        if computed.choice not in self._drawing:
            return None
        self._latest, drawn = self._drawing[computed.choice].submit(
            (computed.logits, computed.largest, computed.parameters)
        )
        return drawn

    def check_drawing(self, choose_tokens: ChooseTokens) -> None:
        """Compile the graphs that draw tokens on the device. If they draw other tokens than `choose_tokens` for random
        logits, let the host draw the tokens of all steps.
        """
        if not self._drawing:
            return
        random = np.random.default_rng(0)
        logits = random.normal(0, 4, (_NUM_CHECKED, self._vocab_size)).astype(np.float16).astype(np.float32)
        largest = np.stack([logits.argmax(1), logits.max(1)], 1).astype(np.float32)
        seeds = random.integers(0, 2**63, _NUM_CHECKED).astype(np.uint64)
        temperatures = random.choice(np.array([0.01, 0.3, 1, 3], np.float32), _NUM_CHECKED)
        given = {"temperature": temperatures, "seed": seeds}
        top_p = random.choice(np.array([0.5, 0.9, 1], np.float32), _NUM_CHECKED)
        min_p = random.choice(np.array([0, 0.01], np.float32), _NUM_CHECKED)
        top_k = random.integers(1, NUM_CANDIDATES + 1, _NUM_CHECKED).astype(np.int32)
        samples = {
            TokenChoice.ALL: SamplingInput.plain(_NUM_CHECKED, **given),
            TokenChoice.LARGEST: SamplingInput.plain(_NUM_CHECKED, top_k=top_k, top_p=top_p, min_p=min_p, **given),
            TokenChoice.SORTED: SamplingInput.plain(_NUM_CHECKED, top_p=top_p, **given),
        }
        for choice, sampling in samples.items():
            _, drawn = self._drawing[choice].submit((logits, largest, drawing_parameters(sampling)))
            differ = tokens_of(drawn.asnumpy()) != choose_tokens(logits, sampling, NO_TOKENS).token_ids
            if np.any(differ):
                self._drawing = {}
                logger.warning(
                    "in the check at start, the device chose other tokens than the host for %d of %d rows of random "
                    "logits, so the host chooses the tokens of all steps that are not greedy",
                    np.count_nonzero(differ),
                    _NUM_CHECKED,
                )
                return
