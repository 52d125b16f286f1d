"""One step after another through the network: arrays in, tokens out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from llm_serving.backends.base import Backend
from llm_serving.core.enums import ImplementationName
from llm_serving.core.fingerprint import UNKNOWN_FINGERPRINT, ComputeFingerprint
from llm_serving.core.step import AllowedTokens, DraftModelClient, Float32Array, Int32Array, StepInput, StepOutput
from llm_serving.core.window import Window
from llm_serving.errors import StepMismatchError
from llm_serving.lowering.lower import lower
from llm_serving.lowering.step_inputs import step_inputs_for_rows
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weight_reader import WeightReader
from llm_serving.network.quantization import Quantization
from llm_serving.worker.block_guard import BlockGuard, Tags
from llm_serving.worker.compiled_graph import Networks, compiled
from llm_serving.worker.kv_cache import CachesOfGraph, KVTensors, check_block_moves
from llm_serving.worker.kv_transfer import TransferMemory
from llm_serving.worker.model_inputs import NO_TOKENS, ModelInputs, ModelLimits, build_model_inputs
from llm_serving.worker.rank_group import RankGroup
from llm_serving.worker.sampler import check_allowed, check_sampling, choose_tokens_for, sample
from llm_serving.worker.scoring import check_scoring, score

_FIRST_TAG: Final = 1
"""Of the first step, among those that compute together; what comes before it has 0."""


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
        num_prompt_rows: int = 0,
        quantization: Quantization | None = None,
        coded_cache: bool = False,
        implementation: ImplementationName = ImplementationName.NATIVE,
        networks: Networks | None = None,
        ranks: RankGroup | None = None,
        step_timeout_s: float = 0.0,
        on_weights: Callable[[int, int], None] | None = None,
        transfer_fd: int | None = None,
        num_transfer_blocks: int = 0,
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
            num_prompt_rows: Most requests of a step; steps of whole prompts then have a graph of their own. 0: they
                have none.
            quantization: How weights are kept; None: in the model dtype.
            coded_cache: Keys and values are kept in 8 bits.
            implementation: Whose network computes the model; others than the native one without `as_program`.
            networks: That have weights and caches in them; None: they are made of the folder.
            ranks: With whom this process computes what `spec` has a share of; None: alone.
            step_timeout_s: Seconds that they are waited for in a step.
            on_weights: Is told the bytes of weights read until now, and of all.
            transfer_fd: Memory by which blocks are handed over; None: none are.
            num_transfer_blocks: Of that memory.

        Raises:
            ModelError: The folder does not hold the weights of `spec`.
            ConfigError: The cache cannot be allocated.
        """
        self.spec = spec
        self.computed_by: ComputeFingerprint = UNKNOWN_FINGERPRINT
        """Told by who chose backend and kernels."""
        self.draft_model: DraftModelClient | None = None
        """That proposes what this one may say, where there is one."""
        self._backend = backend
        self._ranks, self._step_timeout_s = ranks, step_timeout_s
        if networks is None:
            sizes = num_blocks, block_size, num_swap_blocks
            self.kv_tensors = KVTensors.allocate(spec, backend, *sizes, int8=coded_cache)
            if transfer_fd is not None:
                transfer = TransferMemory(transfer_fd, num_transfer_blocks, self.kv_tensors.layers)
                self.kv_tensors = replace(self.kv_tensors, transfer=transfer)
        else:
            self.kv_tensors = CachesOfGraph.of(backend, num_blocks, block_size)
        room = Window.from_model(spec.window, 1, max_model_len).max_request_tokens(block_size, num_blocks)
        max_positions = min(max_model_len, room)
        self._limits = ModelLimits(spec.vocab_size, max_positions, num_blocks, block_size, spec.window)
        self._num_prompt_rows = num_prompt_rows
        if networks is None:
            lowered = lower(
                spec,
                backend,
                WeightReader(folder, spec.scheme, on_weights),
                self.kv_tensors.layers,
                max_positions,
                as_program=as_program,
                whole_prompts=num_prompt_rows > 0,
                quantization=quantization,
                implementation=implementation,
            )
            networks = compiled(lowered, spec.network.hidden, num_prompt_rows)
        self._network, self._states, self._head, self._of_prompts = networks
        self._choose_tokens = choose_tokens_for(backend.name)
        shared = self.kv_tensors.transfer
        tags = None if shared is None else Tags(shared.epochs, shared.num_written)
        self._guard = BlockGuard(num_blocks, self.kv_tensors.num_swap_blocks, block_size, spec.window, tags)
        self._next_step = 0
        self._previous: Int32Array = NO_TOKENS

    @property
    def num_compilations(self) -> int:
        """Graphs compiled so far; after `warm_up` one for each part of the network, whatever the batches."""
        parts = self._network, self._states, self._head, self._of_prompts
        return sum(each.num_compilations for each in parts if each is not None)

    def warm_up(self) -> None:
        """Compiles the network and touches what the first steps need; block 0 is written, so no step may have run."""
        for query_lens in ((1,), (2, 1)):
            lens = np.array(query_lens, np.int32)
            num_rows, num_tokens = len(lens), int(lens.sum())
            inputs = ModelInputs(
                token_ids=np.zeros(num_tokens, np.int32),
                positions=np.zeros(num_tokens, np.int32),
                slot_mapping=np.zeros(num_tokens, np.int32),
                block_tables=np.zeros((num_rows, 1), np.int32),
                query_lens=lens,
                context_lens=lens,
                sample_indices=np.arange(num_rows, dtype=np.int32),
            )
            self._forward(inputs)
            self._logits_of(self._states(inputs.arrays()))

    def announce_ending(self, tell: Callable[[], None] | None) -> bool:
        """As `Backend.announce_ending`, for the step that comes next."""
        return self._backend.announce_ending(tell)

    def execute(self, step: StepInput, await_allowed: Callable[[], AllowedTokens] | None = None) -> StepOutput:
        """Moves the blocks of one step, runs it and gives its results.

        Args:
            step: What to run.
            await_allowed: Waits for the tokens that its samples may choose, where they follow.

        Raises:
            StepMismatchError: The step is not the one after the latest; nothing was moved or computed.
            WorkerError: The step contradicts itself, reaches outside model, cache or host pool, or would read what is
                not its own; nothing was computed. The step counts as done; a row of the next one that refers to its
                tokens computes something to be thrown away.
            RankLostError: Those it computes with are gone, or elsewhere: no step can be computed any more.
        """
        if self._ranks is None:
            return self._execute(step, await_allowed)
        self._ranks.begin(_FIRST_TAG + step.step, self._step_timeout_s)
        try:
            return self._execute(step, await_allowed)
        except Exception:
            self._ranks.check()
            raise

    def _execute(self, step: StepInput, await_allowed: Callable[[], AllowedTokens] | None) -> StepOutput:
        if step.step != self._next_step:
            raise StepMismatchError(f"steps must arrive in order: expected step {self._next_step}. Given: {step.step}")
        # Until this step's tokens are chosen they count as failed ones: a step that is on its way already may refer to
        # them for requests that this failure ends, and must still compute its other rows.
        previous, self._previous = self._previous, np.full(step.sampling.num_samples, -1, np.int32)
        self._next_step += 1
        check_sampling(step.sampling, self._limits.vocab_size)
        check_scoring(step.scoring, self._limits.vocab_size)
        inputs = build_model_inputs(step, previous, self._limits)
        tensors = self.kv_tensors
        sizes = tensors.num_blocks, tensors.num_swap_blocks, tensors.num_transfer_blocks
        check_block_moves(step.block_moves, *sizes)
        check_block_moves(step.exports, *sizes, exports=True)
        self._guard.move(step.block_moves)
        self._guard.check(step)
        tensors.move_blocks(step.block_moves)
        self._guard.check_imports(step.block_moves)
        if len(step.wanted) == step.sampling.num_samples:
            logits = self._forward(inputs)[: len(step.wanted)]
            self._export(step.exports)
            step = self._allowing(step, await_allowed)
            output = sample(step.step, logits, step.sampling, previous, self._choose_tokens)
        else:
            states = self._states_of(inputs)
            self._export(step.exports)
            output = self._results(self._allowing(step, await_allowed), states, previous)
        self._previous = output.token_ids
        return output

    def _export(self, exports: Int32Array) -> None:
        """Hands blocks over that are computed."""
        if len(exports):
            self._guard.begin_exports(exports)
            self.kv_tensors.move_blocks(exports)
            self._guard.end_exports(exports)

    def _allowing(self, step: StepInput, await_allowed: Callable[[], AllowedTokens] | None) -> StepInput:
        """The step with the tokens that follow."""
        if not step.allowed_follow:
            return step
        assert await_allowed is not None
        sampling = step.sampling.with_allowed_tokens(await_allowed())
        check_allowed(sampling, self._limits.vocab_size)
        return replace(step, sampling=sampling)

    def _results(self, step: StepInput, states: Float32Array, previous: Int32Array) -> StepOutput:
        """The results of a step that wants more than tokens, from the states [R, H] of its `wanted`."""
        num_samples, num_scored = step.sampling.num_samples, step.scoring.num_results
        vectors = states[num_samples + num_scored :]
        logits = self._logits_of(states[: max(num_samples, 1)])[:num_samples]
        output = sample(step.step, logits, step.sampling, previous, self._choose_tokens)
        to_score = states[num_samples : num_samples + num_scored]
        vocab_size = self._limits.vocab_size
        scored = score(to_score, step.scoring, self._logits_of, vocab_size, self._choose_tokens)
        errors = {num_samples + index: error for index, error in scored.errors.items()}
        for index in np.flatnonzero(~np.isfinite(vectors).all(axis=1)).tolist():
            errors[num_samples + num_scored + index] = "the model's last hidden state is not finite"
        errors = _first_of_each(errors, step.wanted)
        return replace(output, row_errors=output.row_errors | errors, scores=scored.scores, vectors=vectors.copy())

    def _logits_of(self, states: Float32Array) -> Float32Array:
        """[P, H] -> [P, V]"""
        return self._head((states, *step_inputs_for_rows(len(states))))

    def _states_of(self, inputs: ModelInputs) -> Float32Array:
        """What the head reads, [max(S, 1), H]."""
        if self._of_prompts is None or not inputs.are_whole_prompts or inputs.num_rows > self._num_prompt_rows:
            return self._states(_with_a_result(inputs))
        return self._of_prompts(_with_a_result(inputs.with_rows(self._num_prompt_rows)))

    def _forward(self, inputs: ModelInputs) -> Float32Array:
        """Logits [max(S, 1), V]."""
        if self._network is not None:
            return self._network(_with_a_result(inputs))
        return self._logits_of(self._states_of(inputs))


def _with_a_result(inputs: ModelInputs) -> tuple[Int32Array, ...]:
    """The arrays of a step; one in which no prompt ends asks for one row all the same.

    An empty tensor is the one shape that not every kernel takes.
    """
    arrays = inputs.arrays()
    return arrays if len(inputs.sample_indices) else (*arrays[:-1], np.zeros(1, np.int32))


def _first_of_each(errors: dict[int, str], wanted: Int32Array) -> dict[int, str]:
    """Those of each row and kind but the first add nothing."""
    first: dict[tuple[int, int], int] = {}
    for index in sorted(errors):
        row, _, kind = wanted[index].tolist()
        first.setdefault((row, kind), index)
    return {index: errors[index] for index in first.values()}
