"""A network in graph mode with a KV cache, which returns the logits of every token of a step."""

import functools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from llm_serving.backends import Backend, create_backend
from llm_serving.backends.cpu import load_plugin
from llm_serving.config.sections.device import DeviceConfig
from llm_serving.core.enums import ImplementationName
from llm_serving.lowering.lower import lower
from llm_serving.lowering.step_inputs import step_inputs_for_rows
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weight_reader import WeightReader
from llm_serving.network.quantization import Quantization
from llm_serving.worker.compiled_graph import CompiledNetwork
from llm_serving.worker.device import configure_device
from llm_serving.worker.kv_cache import KVTensors
from llm_serving.worker.model_inputs import NO_TOKENS, ModelLimits, build_model_inputs
from support.step_factories import step_input
from support.without_library import is_without_library

BLOCK_SIZE = 16


@functools.cache
def backend(name: str, dtype: str) -> Backend:
    """Return a backend after loading the operator library: MindSpore looks for it once, before a process's first
    operator.
    """
    if not is_without_library():
        load_plugin()
    configure_device(DeviceConfig())
    return create_backend(name, dtype)


def implementation_of(kernels: str) -> ImplementationName:
    """Return the implementation of a table's column: `mindformers`, or `native` for names of kernels."""
    return ImplementationName(kernels) if kernels in tuple(ImplementationName) else ImplementationName.NATIVE


def poison(kv_tensors: KVTensors, block_ids: Iterable[int], state_slots: Iterable[int] = ()) -> None:
    """Fill these blocks and states of every layer with NaN."""
    for states in kv_tensors.states:
        states.storage[list(state_slots)] = np.nan
    for cache in (cache for layer in kv_tensors.layers for cache in layer):
        cache.storage.view(np.uint8)[list(block_ids)] = 0xFF  # NaN in every dtype


class GraphModel:
    """A network whose cache is initially NaN, so that reading unwritten slots fails a test."""

    def __init__(
        self,
        spec: ModelSpec,
        folder: Path,
        backend: Backend,
        num_blocks: int = 32,
        num_swap_blocks: int = 0,
        as_program: bool = True,
        quantization: Quantization | None = None,
        implementation: ImplementationName = ImplementationName.NATIVE,
    ) -> None:
        if implementation != ImplementationName.NATIVE:
            spec = spec.of_mindformers()
        kv_tensors = KVTensors.allocate(
            spec, backend, num_blocks, BLOCK_SIZE, num_swap_blocks, num_state_slots=num_blocks
        )
        self.kv_tensors = kv_tensors
        poison(kv_tensors, range(num_blocks), range(num_blocks))
        max_positions = min(spec.max_position_embeddings, num_blocks * BLOCK_SIZE)
        weights = WeightReader(folder, spec.scheme)
        self._keeps_states = len(spec.states) > 0
        ways = {
            "states": kv_tensors.states,
            "as_program": as_program,
            "quantization": quantization,
            "implementation": implementation,
        }
        lowered = lower(spec, backend, weights, kv_tensors.layers, max_positions, **ways)
        self._network = None if lowered.logits is None else CompiledNetwork(lowered.logits)
        self._states = CompiledNetwork(lowered.states)
        self._head = CompiledNetwork(lowered.head, lowered.head_inputs(spec.network.hidden))
        self._limits = ModelLimits(spec.vocab_size, max_positions, num_blocks, BLOCK_SIZE)

    @property
    def num_compilations(self) -> int:
        return (self._network or self._states).num_compilations

    def logits(self, *rows, samples=None) -> np.ndarray:
        """Run a step of rows (token_ids, num_computed, block_ids); return logits of all tokens, or of the last of
        `samples`.
        """
        if self._network is None:
            return self.head(self.states(*rows, samples=samples))
        return self._network(self._arrays(rows, samples)).copy()

    def states(self, *rows, samples=None) -> np.ndarray:
        """Return the inputs of the LM head, with the arguments of `logits`."""
        return self._states(self._arrays(rows, samples)).copy()

    def head(self, states: np.ndarray) -> np.ndarray:
        """Return the logits of states."""
        return self._head((states, *step_inputs_for_rows(len(states)))).copy()

    def _arrays(self, rows, samples):
        inputs = build_model_inputs(step_input(rows, samples=samples), NO_TOKENS, self._limits)
        if samples is None:
            inputs = replace(inputs, sample_indices=np.arange(len(inputs.token_ids), dtype=np.int32))
        if self._keeps_states:
            inputs = replace(inputs, states=_states_of(rows))
        return inputs.arrays()


def _states_of(rows) -> tuple[np.ndarray, np.ndarray]:
    """Return the state slots: each sequence uses the slot with the number of its first block."""
    state_in = [block_ids[0] if num_computed else -1 for _, num_computed, block_ids in rows]
    state_out = [slot for token_ids, _, block_ids in rows for slot in [-1] * (len(token_ids) - 1) + [block_ids[0]]]
    return np.array(state_in, np.int32), np.array(state_out, np.int32)
