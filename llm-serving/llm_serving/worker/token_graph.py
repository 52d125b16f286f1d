"""The graph for steps whose rows have one token: decode steps, and every step of a backend with `attention_rows`."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np

from llm_serving.core.step import Float32Array, Int32Array
from llm_serving.worker.compiled_graph import CompiledNetwork
from llm_serving.worker.model_inputs import ModelInputs, all_true


class DeviceLogits:
    """Logits in the memory of the device, which computes them while the host continues.

    Args:
        logits: float32 [S, V]
        token_ids, largest: The two results of `Backend.largest_logits`; None: the graph does not compute them.
    """

    def __init__(self, logits: ms.Tensor, token_ids: ms.Tensor | None = None, largest: ms.Tensor | None = None) -> None:
        self.logits, self.token_ids, self.largest = logits, token_ids, largest

    def copy(self) -> Float32Array:
        """Wait for the step, and return a copy of the logits on the host, [S, V]."""
        copied: Float32Array = self.logits.asnumpy()
        return copied


def most_likely(largest: Float32Array) -> Int32Array | None:
    """Return the token with the largest logit of each row, [S]. `largest`: from `DeviceLogits.largest`. Return None if
    a largest logit is not finite, so that sampling reports the error.
    """
    ids, values = largest.T
    return ids.astype(np.int32) if all_true(np.isfinite(values)) else None


class TokenGraph:
    """Runs a compiled `lowering.cells.TokenNetwork`. Its input may refer to token ids that its latest run computed."""

    def __init__(self, network: CompiledNetwork, attention_rows: int) -> None:
        self._network = network
        self._attention_rows = attention_rows
        self._latest = ms.Tensor(np.zeros(1, np.int32))
        """Token ids of the latest run, in the memory of the device."""

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

        Args:
            given_ids: Token ids with references to the previous step (`core.step.reference_to_previous_step`), which
                stand for the most likely tokens that the latest run computed; None: there are no references.
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
