"""The graph of steps whose rows have one token: decode steps, and every step of a backend with `attention_rows`.

The device chooses their tokens, unless a sample needs more than `can_draw` allows.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np

from llm_serving.backends.base import Backend
from llm_serving.backends.token_drawing import MAX_DRAWN_VOCAB, MAX_TOP_K, NUM_PIECES, PARAMETERS, PIECE_BITS
from llm_serving.core.step import Float32Array, Int32Array, SamplingInput
from llm_serving.log import get_logger
from llm_serving.worker.compiled_graph import CompiledNetwork
from llm_serving.worker.logprobs import weight_scales
from llm_serving.worker.model_inputs import NO_TOKENS, ModelInputs, all_true
from llm_serving.worker.sampler import ChooseTokens, greedy_samples, uses_logits_unchanged
from llm_serving.worker.sampling_reference import uniform

logger = get_logger(__name__)

_SMALLEST_SHARE = np.float32(2**-20)
"""A smaller `top_p` keeps one token as well: its weight, 1, is more than this share of 2^18 weights."""
_NUM_CHECKED = 64


class DeviceLogits:
    """Logits in the memory of the device, which computes them while the host continues.

    Args:
        logits: float32 [S, V]
        token_ids, largest: The two results of `Backend.largest_logits`; None: the graph does not compute them.
    """

    def __init__(self, logits: ms.Tensor, token_ids: ms.Tensor | None = None, largest: ms.Tensor | None = None) -> None:
        self.logits, self.token_ids, self.largest = logits, token_ids, largest

    def copy(self) -> Float32Array:
        """Wait for the step. Return a copy of the logits on the host, [S, V]."""
        copied: Float32Array = self.logits.asnumpy()
        return copied


def tokens_of(chosen: Float32Array) -> Int32Array | None:
    """Return the tokens [S] from the result of `TokenGraph.choose`; None: a largest logit is not finite.

    Sampling on the host then reports the error in these logits.
    """
    ids, values = chosen.T
    return ids.astype(np.int32) if all_true(np.isfinite(values)) else None


def can_draw(sampling: SamplingInput) -> bool:
    """Return whether the graph of `Backend.token_drawing` can choose the tokens of samples that use logits unchanged.

    A sample with `top_p` must have `top_k`, at most `MAX_TOP_K`, because finding the most likely tokens among all of
    them takes the device longer than copying the logits.
    """
    limited = (sampling.top_k > 0) & (sampling.top_k <= MAX_TOP_K)
    drawn = (limited | ((sampling.top_k == 0) & (sampling.top_p == 1))) & (sampling.typical_p == 1)
    return all_true(greedy_samples(sampling) | drawn)


def drawing_parameters(sampling: SamplingInput) -> Float32Array:
    """Return the parameters of `TokenDrawing`, float32 [S, 13]."""
    greedy = greedy_samples(sampling)
    return np.column_stack(
        [
            np.arange(len(greedy), dtype=np.float32),
            greedy,
            weight_scales(sampling.temperature),
            sampling.min_p,
            np.where(greedy, 0, sampling.top_k),
            *_pieces(uniform(sampling.seed, sampling.position)),
            *_pieces(np.maximum(sampling.top_p, _SMALLEST_SHARE)),
        ]
    ).astype(np.float32)


def _pieces(fractions: Any) -> list[Any]:
    """Divide multiples of 2^-53 up to 1, [S], into `NUM_PIECES` integers, highest first."""
    whole = np.ldexp(fractions.astype(np.float64), 53).astype(np.int64)
    return [whole >> PIECE_BITS * index & (1 << PIECE_BITS) - 1 for index in reversed(range(NUM_PIECES))]


class TokenGraph:
    """Runs a compiled `lowering.cells.TokenNetwork`, which can read token ids from its latest run, and the graphs that
    draw tokens from its logits.
    """

    def __init__(self, network: CompiledNetwork, backend: Backend, vocab_size: int) -> None:
        self._network = network
        self._attention_rows = backend.attention_rows
        self._vocab_size = vocab_size
        shapes = [None, vocab_size], [None, 2], [None, sum(PARAMETERS.values())]
        inputs = [ms.Tensor(shape=list(shape), dtype=ms.float32) for shape in shapes]
        self._drawing = {
            has_limits: CompiledNetwork(cell, inputs, is_decode=True)
            for has_limits in (False, True)
            if vocab_size <= MAX_DRAWN_VOCAB
            and (cell := backend.token_drawing(vocab_size, has_limits=has_limits)) is not None
        }
        """Whether samples may have `top_k` -> the graph that draws them."""
        self._latest = ms.Tensor(np.zeros(1, np.int32))

    @property
    def num_compilations(self) -> int:
        return self._network.num_compilations

    def computes(self, inputs: ModelInputs) -> bool:
        """Return whether this graph can compute the step. Without `attention_rows`, each row must have one token, and
        each token one result.
        """
        return bool(self._attention_rows) or len(inputs.token_ids) == inputs.num_rows == len(inputs.sample_indices)

    def submit(self, inputs: ModelInputs, given_ids: Int32Array | None = None) -> DeviceLogits:
        """Start a step. A step without results returns the logits of its first token, because some kernels need a row.

        `given_ids`: token ids with references to the previous step (`core.step.reference_to_previous_step`), which
        stand for the tokens that the device chose in the latest run; None: there are no references.
        """
        num_tokens, num_latest = len(inputs.token_ids), self._latest.shape[0]
        # Index of each token among those of the latest run, followed by those of this one.
        sources = np.arange(num_latest, num_latest + num_tokens, dtype=np.int32)
        if given_ids is not None:
            sources = np.where(given_ids < 0, np.int32(-1) - given_ids, sources)
        if self._attention_rows:
            inputs = inputs.with_token_rows(self._attention_rows)
        arguments: tuple[Any, ...] = (
            np.stack([inputs.token_ids, inputs.positions, inputs.slot_mapping, sources]),
            self._latest,
            inputs.block_tables,
            inputs.context_lens,
        )
        if self._attention_rows:
            arguments = *arguments, inputs.query_lens, inputs.selected_indices
        computed = DeviceLogits(*self._network.submit(arguments))
        assert computed.token_ids is not None
        self._latest = computed.token_ids
        return computed

    def choose(self, computed: DeviceLogits, sampling: SamplingInput) -> ms.Tensor | None:
        """Start to choose the tokens of a step that `submit` returned; None: the host must sample.

        Return them for `tokens_of`, float32 [S, 2]. The next step can refer to them.
        """
        if not uses_logits_unchanged(sampling):
            return None
        if all_true(greedy_samples(sampling)):
            return computed.largest
        if not self._drawing or not can_draw(sampling):
            return None
        self._latest, drawn = self._draw(computed.logits, computed.largest, sampling)
        return drawn

    def _draw(self, logits: Any, largest: Any, sampling: SamplingInput) -> Any:
        parameters = drawing_parameters(sampling)
        has_limits = bool((sampling.top_k > 1).any())
        return self._drawing[has_limits].submit((logits, largest, parameters))

    def check_drawing(self, choose_tokens: ChooseTokens) -> None:
        """Compile the graphs that draw tokens, and compare their tokens with the sampler's for random logits.

        If they differ, log it, and let the host sample.
        """
        if not self._drawing:
            return
        random = np.random.default_rng(0)
        logits = random.normal(0, 4, (_NUM_CHECKED, self._vocab_size)).astype(np.float16).astype(np.float32)
        largest = np.stack([logits.argmax(1), logits.max(1)], 1).astype(np.float32)
        seeds = random.integers(0, 2**63, _NUM_CHECKED).astype(np.uint64)
        temperatures = random.choice(np.array([0.01, 0.3, 1, 3], np.float32), _NUM_CHECKED)
        plain = SamplingInput.plain(_NUM_CHECKED, temperature=temperatures, seed=seeds)
        limited = SamplingInput.plain(
            _NUM_CHECKED,
            temperature=temperatures,
            seed=seeds,
            top_k=random.integers(1, MAX_TOP_K + 1, _NUM_CHECKED).astype(np.int32),
            top_p=random.choice(np.array([0.5, 0.9, 1], np.float32), _NUM_CHECKED),
            min_p=random.choice(np.array([0, 0.01], np.float32), _NUM_CHECKED),
        )
        for sampling in (plain, limited):
            _, drawn = self._draw(logits, largest, sampling)
            differ = tokens_of(drawn.asnumpy()) != choose_tokens(logits, sampling, NO_TOKENS).token_ids
            if np.any(differ):
                self._drawing = {}
                logger.warning(
                    "the device drew other tokens than the sampler for %d of %d rows of random logits: the host draws "
                    "the tokens of steps that are not greedy",
                    np.count_nonzero(differ),
                    _NUM_CHECKED,
                )
                return
