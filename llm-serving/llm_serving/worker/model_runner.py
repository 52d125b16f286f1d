"""One step after another through the network: arrays in, tokens out."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llm_serving.backends.base import Backend
from llm_serving.core.step import Float32Array, Int32Array, StepInput, StepOutput
from llm_serving.core.window import Window
from llm_serving.errors import StepMismatchError
from llm_serving.lowering.lower import lower
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weights import WeightReader
from llm_serving.worker.block_guard import BlockGuard
from llm_serving.worker.block_moves import check_block_moves
from llm_serving.worker.compiled_network import CompiledNetwork
from llm_serving.worker.kv_tensors import KVTensors
from llm_serving.worker.model_inputs import NO_TOKENS, ModelInputs, ModelLimits, build_model_inputs
from llm_serving.worker.sampler import check_sampling, choose_tokens_for, sample


class ModelRunner:
    """Owns network and KV cache; must be built and used by one and the same thread.

    Between steps it remembers nothing but the cache, the number of the next step and the tokens of the latest one.
    """

    def __init__(
        self,
        spec: ModelSpec,
        folder: Path,
        backend: Backend,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        num_swap_blocks: int = 0,
        *,
        as_program: bool = True,
    ) -> None:
        """Reads the weights and allocates the cache; `warm_up` compiles.

        Args:
            spec: The model.
            folder: Its safetensors files.
            backend: From `worker.device.backend_for`, after `configure_device`.
            num_blocks: Blocks of the KV cache.
            block_size: Tokens of a block.
            max_model_len: Longest context of a row, in tokens.
            num_swap_blocks: Blocks of the host pool.
            as_program: One operator runs the network, where the backend has that.

        Raises:
            ModelError: The folder does not hold the weights of `spec`.
            ConfigError: The cache cannot be allocated.
        """
        self.spec = spec
        self._backend = backend
        self.kv_tensors = KVTensors.allocate(spec, backend, num_blocks, block_size, num_swap_blocks)
        room = Window.of(spec.window, 1, max_model_len).longest(block_size, num_blocks)
        max_positions = min(max_model_len, room)
        self._limits = ModelLimits(spec.vocab_size, max_positions, num_blocks, block_size, spec.window)
        self._network = CompiledNetwork(
            lower(spec, backend, WeightReader(folder), self.kv_tensors.layers, max_positions, as_program=as_program)
        )
        self._choose_tokens = choose_tokens_for(backend.name)
        self._guard = BlockGuard(num_blocks, self.kv_tensors.num_swap_blocks, block_size, spec.window)
        self._next_step = 0
        self._previous: Int32Array = NO_TOKENS

    @property
    def num_compilations(self) -> int:
        """Graphs compiled so far; 1 after `warm_up`, whatever the batches."""
        return self._network.num_compilations

    def warm_up(self) -> None:
        """Compiles the network and touches what the first steps need; block 0 is written, so no step may have run."""
        for query_lens in ((1,), (2, 1)):
            lens = np.array(query_lens, np.int32)
            num_rows, num_tokens = len(lens), int(lens.sum())
            self._forward(
                ModelInputs(
                    token_ids=np.zeros(num_tokens, np.int32),
                    positions=np.zeros(num_tokens, np.int32),
                    slot_mapping=np.zeros(num_tokens, np.int32),
                    block_tables=np.zeros((num_rows, 1), np.int32),
                    query_lens=lens,
                    context_lens=lens,
                    sample_indices=np.arange(num_rows, dtype=np.int32),
                )
            )

    def announce_ending(self, socket_fd: int, frame: bytes) -> bool:
        """As `Backend.announce_ending`, for the step that comes next."""
        return self._backend.announce_ending(socket_fd, frame)

    def execute(self, step: StepInput) -> StepOutput:
        """Moves the blocks of one step, runs it and chooses its tokens.

        Raises:
            StepMismatchError: The step is not the one after the latest; nothing was moved or computed.
            WorkerError: The step contradicts itself, reaches outside model, cache or host pool, or would read what is
                not its own; nothing was computed. The step counts as done; a row of the next one that refers to its
                tokens computes something to be thrown away.
        """
        if step.step != self._next_step:
            raise StepMismatchError(f"steps must arrive in order: expected step {self._next_step}. Given: {step.step}")
        # Until this step's tokens are chosen they count as failed ones: a step that is on its way already may refer to
        # them for requests that this failure ends, and must still compute its other rows.
        previous, self._previous = self._previous, np.full(len(step.sample_rows), -1, np.int32)
        self._next_step += 1
        check_sampling(step.sampling, self._limits.vocab_size)
        inputs = build_model_inputs(step, previous, self._limits)
        check_block_moves(step.block_moves, self.kv_tensors.num_blocks, self.kv_tensors.num_swap_blocks)
        self._guard.move(step.block_moves)
        self._guard.check(step)
        self.kv_tensors.move_blocks(step.block_moves)
        logits = self._forward(inputs)
        output = sample(step.step, logits[: len(step.sample_rows)], step.sampling, previous, self._choose_tokens)
        self._previous = output.token_ids
        return output

    def _forward(self, inputs: ModelInputs) -> Float32Array:
        """Logits [max(S, 1), V]: a step in which no prompt ends asks for one row all the same.

        An empty tensor is the one shape that not every kernel takes.
        """
        arrays = inputs.arrays()
        if not len(inputs.sample_indices):
            arrays = (*arrays[:-1], np.zeros(1, np.int32))
        return self._network(arrays)
