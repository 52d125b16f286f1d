"""The graph of steps whose rows have one token: decode steps, and every step of a backend with `attention_rows`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np

from llm_serving.core.step import Float32Array, Int32Array
from llm_serving.worker.compiled_graph import CompiledNetwork
from llm_serving.worker.model_inputs import ModelInputs, all_true


@dataclass(frozen=True)
class DeviceLogits:
    """Logits in the memory of the device, which compute while the host continues."""

    logits: ms.Tensor  # float32 [S, V]
    largest: ms.Tensor  # float32 [S, 2], as `Backend.largest_logits`

    def copy(self) -> Float32Array:
        """Wait for the step and return the logits [S, V]."""
        copied: Float32Array = self.logits.asnumpy()
        return copied

    def most_likely(self) -> Int32Array | None:
        """Wait for the step and return the token of the largest logit of each row, [S]. None if a largest logit is not
        finite: sampling says what is wrong with such logits.
        """
        ids, values = self.largest.asnumpy().T
        return ids.astype(np.int32) if all_true(np.isfinite(values)) else None


class TokenGraph:
    """Runs a compiled `lowering.cells.TokenNetwork`."""

    def __init__(self, network: CompiledNetwork, attention_rows: int) -> None:
        self._network = network
        self._attention_rows = attention_rows

    @property
    def num_compilations(self) -> int:
        return self._network.num_compilations

    def computes(self, inputs: ModelInputs) -> bool:
        """Return whether the graph computes such a step. Without `attention_rows`, each row must have one token, which
        gives a result.
        """
        return bool(self._attention_rows) or len(inputs.token_ids) == inputs.num_rows == len(inputs.sample_indices)

    def submit(self, inputs: ModelInputs) -> DeviceLogits:
        """Start a step. A step without results gives the logits of its first token, because some kernels need a row."""
        if self._attention_rows:
            inputs = inputs.with_token_rows(self._attention_rows)
        arguments: tuple[Any, ...] = (
            np.stack([inputs.token_ids, inputs.positions, inputs.slot_mapping]),
            inputs.block_tables,
            inputs.context_lens,
        )
        if self._attention_rows:
            arguments = *arguments, inputs.query_lens, inputs.selected_indices
        return DeviceLogits(*self._network.submit(arguments))
