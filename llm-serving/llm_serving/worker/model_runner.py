"""Runs steps on the network: from a step's arrays to sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from msgspec import structs

from llm_serving.backends.base import Backend
from llm_serving.backends.parameters import is_on_npu
from llm_serving.core.enums import ImplementationName
from llm_serving.core.fingerprint import UNKNOWN_FINGERPRINT, ComputeFingerprint
from llm_serving.core.step import (
    AllowedTokens,
    DraftModelClient,
    Float32Array,
    Int32Array,
    SamplingInput,
    StepInput,
    StepOutput,
)
from llm_serving.core.window import CacheGroups
from llm_serving.errors import StepMismatchError, WorkerError
from llm_serving.lowering.lower import lower
from llm_serving.lowering.parameters import Parameters
from llm_serving.lowering.step_inputs import step_inputs_for_rows
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weight_reader import WeightReader
from llm_serving.network.adapters import AdaptedLinear, AdapterLimits, experts_modules
from llm_serving.network.quantization import Quantization
from llm_serving.worker.adapters import AdapterMemory
from llm_serving.worker.block_guard import NO_SLOT, BlockGuard, BlockTags, StateGuard
from llm_serving.worker.compiled_graph import StepNetwork, StepNetworks, compile_networks
from llm_serving.worker.hidden_states import HiddenStates, newest_tokens
from llm_serving.worker.kv_cache import GraphOwnedCache, KVTensors, TransferMemory
from llm_serving.worker.model_inputs import NO_TOKENS, ModelInputs, ModelLimits, build_model_inputs, resolve_token_ids
from llm_serving.worker.rank_group import RankGroup
from llm_serving.worker.sampler import (
    SamplingCheck,
    check_allowed,
    choose_tokens_for,
    output_of_tokens,
    sample,
)
from llm_serving.worker.scoring import (
    check_scoring,
    means,
    num_states_per_result,
    score,
    with_all_states,
    with_token_types,
)
from llm_serving.worker.token_graph import DeviceLogits, HostCopy, StartedStep, TokenGraph, tokens_of

_FIRST_TAG: Final = 1
"""Number of the first step in `RankGroup.start_step`. What ranks exchange before the first step has the number 0."""


class ModelRunner:
    """Owns the network and the KV cache. Create and use it in one thread."""

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
        num_state_slots: int = 0,
        as_program: bool = True,
        num_prompt_rows: int = 0,
        quantization: Quantization | None = None,
        int8_cache: bool = False,
        implementation: ImplementationName = ImplementationName.NATIVE,
        networks: StepNetworks | None = None,
        ranks: RankGroup | None = None,
        step_timeout_s: float = 0.0,
        on_weights: Callable[[int, int], None] | None = None,
        transfer_fd: int | None = None,
        num_transfer_blocks: int = 0,
        adapters: AdapterLimits | None = None,
    ) -> None:
        """Read the weights and allocate the cache. `warm_up` compiles the network.

        Args:
            num_prompt_rows: Maximum number of requests in a step of whole prompts, or 0 if there is no graph for them.
            networks: Networks that contain weights and caches. If None, they are built from the folder.
            on_weights: Called with the bytes of weights read so far, and the total.

        Raise ModelError if the folder lacks the weights of `spec`, ConfigError if the cache cannot be allocated.
        """
        self.adapters: AdapterMemory | None = None
        self.runs_program = as_program = as_program and backend.program() is not None
        linears: list[AdaptedLinear] = []
        if implementation != ImplementationName.NATIVE:
            spec = spec.of_mindformers()
        if adapters is not None:
            spec, linears = spec.with_adapters(*adapters, as_program=as_program)
        self.spec = spec
        self.compute_fingerprint: ComputeFingerprint = UNKNOWN_FINGERPRINT
        self.draft_model: DraftModelClient | None = None
        self.hidden_states: HiddenStates | None = None
        """Hidden states of the newest tokens, which the MTP layer reads, or None if they are not kept."""
        self.parameters: Parameters = {}
        self._backend = backend
        self._ranks, self._step_timeout_s = ranks, step_timeout_s
        if networks is None:
            sizes = num_blocks, block_size, num_swap_blocks
            self.kv_tensors = KVTensors.allocate(
                spec, backend, *sizes, num_state_slots=num_state_slots, int8=int8_cache
            )
            if transfer_fd is not None:
                transfer = TransferMemory(transfer_fd, num_transfer_blocks, self.kv_tensors.layers)
                self.kv_tensors = replace(self.kv_tensors, transfer=transfer)
        else:
            self.kv_tensors = GraphOwnedCache(backend, (), (), num_blocks, 0, block_size)
        groups = CacheGroups.of(spec.layout.windows, 1, max_model_len)
        self.max_positions = max_positions = min(max_model_len, groups.max_request_tokens(block_size, num_blocks))
        self._limits = ModelLimits(
            spec.network.num_input_ids, max_positions, num_blocks, block_size, groups, spec.layout.group_parts
        )
        self._num_prompt_rows = num_prompt_rows
        if networks is None:
            lowered = lower(
                spec,
                backend,
                WeightReader(folder, spec.scheme, on_weights),
                self.kv_tensors.layers + self.kv_tensors.views,
                max_positions,
                as_program=as_program,
                whole_prompts=num_prompt_rows > 0,
                quantization=quantization,
                implementation=implementation,
                states=self.kv_tensors.states,
            )
            if adapters is not None:
                self.adapters = AdapterMemory(
                    linears,
                    experts_modules(spec.network),
                    lowered.parameters,
                    backend.dtype,
                    adapters,
                    as_program=as_program,
                )
            self.parameters = lowered.parameters
            networks = compile_networks(
                lowered, spec.network.hidden, num_prompt_rows, has_adapters=adapters is not None
            )
        self._network, self._states, self._head, self._prompts, tokens = networks
        self._tokens = None if tokens is None else TokenGraph(tokens, backend, spec.network.vocab)
        self._choose_tokens = choose_tokens_for(backend.name)
        self._check_sampling = SamplingCheck(spec.network.vocab)
        shared = self.kv_tensors.transfer
        tags = None if shared is None else BlockTags(shared.epochs, shared.num_written)
        self._state_guard = StateGuard(num_state_slots) if spec.states else None
        states = None if self._state_guard is None else self._state_guard.tags
        sizes = num_blocks, self.kv_tensors.num_swap_blocks, block_size
        self._guard = BlockGuard(*sizes, groups, tags, states)
        self._next_step = 0
        self._previous: Int32Array | StartedStep = NO_TOKENS

    @property
    def num_compilations(self) -> int:
        """Number of graphs compiled so far. After `warm_up` it must not grow."""
        parts = self._network, self._states, self._head, self._prompts, self._tokens
        return sum(each.num_compilations for each in parts if each is not None)

    def warm_up(self) -> None:
        """Compile the network, and initialize what the first steps need. Call this first, as it overwrites blocks."""
        num_groups = len(self._limits.groups.windows)
        for query_lens in ((1,), (2, 1)):
            lens = np.array(query_lens, np.int32)
            num_rows, num_tokens = len(lens), int(lens.sum())
            inputs = ModelInputs(
                token_ids=np.zeros(num_tokens, np.int32),
                positions=np.zeros(num_tokens, np.int32),
                slot_mapping=np.zeros(num_tokens * num_groups, np.int32),
                block_tables=np.zeros((num_rows * num_groups, 1), np.int32),
                query_lens=lens,
                context_lens=lens,
                sample_indices=np.arange(num_rows, dtype=np.int32),
                states=tuple(np.full(size, NO_SLOT, np.int32) for size in (num_rows, num_tokens) if self.spec.states),
                adapter_slots=(np.full(num_tokens, NO_SLOT, np.int32),) if self.adapters is not None else (),
            )
            self._forward(inputs)
            self._states_of(inputs)
            self.logits_of(self._states(self._planned(inputs).arrays()))
        if self._tokens is not None and is_on_npu():
            self._tokens.check_drawing(self._choose_tokens)
        self.kv_tensors.clear()

    def announce_ending(self, announce: Callable[[], None] | None) -> bool:
        return self._backend.announce_ending(announce)

    def execute(self, step: StepInput, await_allowed: Callable[[], AllowedTokens] | None = None) -> StepOutput:
        started = self.start(step, await_allowed)
        return started.output() if isinstance(started, StartedStep) else started

    def start(
        self, step: StepInput, await_allowed: Callable[[], AllowedTokens] | None = None
    ) -> StepOutput | StartedStep:
        """Move the blocks of a step and run it. Return its results, or a `StartedStep` if a device still computes them.

        Args:
            await_allowed: Waits for the allowed tokens of the step's samples, if the master sends them later.

        Raises:
            StepMismatchError: The step is not the next one. Nothing was moved or computed.
            WorkerError: The step is inconsistent, too large, or reads blocks that were not written for it. Nothing was
                computed, but the step counts as done. The caller must discard results of the next step that depend on
                tokens of this step.
            RankLostError: Another rank has exited or computes a different step. No further step can be computed.
        """
        if self._ranks is None:
            return self._start(step, await_allowed)
        self._ranks.start_step(_FIRST_TAG + step.step, self._step_timeout_s)
        try:
            return self._start(step, await_allowed)
        except Exception:
            self._ranks.check()
            raise

    def _start(self, step: StepInput, await_allowed: Callable[[], AllowedTokens] | None) -> StepOutput | StartedStep:
        if step.step != self._next_step:
            raise StepMismatchError(f"steps must arrive in order: expected step {self._next_step}. Given: {step.step}")
        # Until they are sampled, this step's tokens count as failed. If this step fails, the next one, which may be
        # submitted already, can refer to them and must still compute its other rows.
        latest, self._previous = self._previous, np.full(step.sampling.num_samples, -1, np.int32)
        self._next_step += 1
        # If the device still computes the previous step, the device replaces the references in `token_ids`.
        previous = latest.placeholders if isinstance(latest, StartedStep) else latest
        network = self.spec.network
        self._check_sampling(step.sampling)
        check_scoring(step.scoring, network.vocab)
        inputs = with_token_types(build_model_inputs(step, previous, self._limits), network.vocab, network.positions)
        self._guard.check_ids(step.block_moves)
        self._guard.check_ids(step.exports, exports=True)
        self._guard.move(step.block_moves)
        self._guard.check(step)
        if self._state_guard is not None:
            inputs = replace(inputs, states=self._state_guard.check(step))
        if self.adapters is not None:
            slots = self.adapters.slots_of_tokens(step.adapters, step.query_lens)
            inputs = replace(inputs, adapter_slots=(slots,))
        elif len(step.adapters):
            raise WorkerError("adapters must be empty: the model was loaded without adapter slots")
        self.kv_tensors.move_blocks(step.block_moves)
        self._guard.check_imports(step.block_moves)
        if self.hidden_states is not None:
            self.hidden_states.drop(step.block_moves, inputs.slot_mapping)
        if self._tokens is not None and len(step.result_tokens) == step.sampling.num_samples:
            self._previous = started = self._submit(step, inputs, latest, await_allowed)
            return started
        if isinstance(latest, StartedStep):
            inputs, previous = _resolved(step, inputs, latest)
        if len(step.result_tokens) == step.sampling.num_samples:
            output = self._sample(step, inputs, previous, await_allowed)
        else:
            states = self._pooled_states_of(inputs, step.result_tokens)
            self._export(step.exports)
            output = self._results(self._with_allowed_tokens(step, await_allowed), states, previous)
        self._previous = output.token_ids
        return output

    def _sample(
        self,
        step: StepInput,
        inputs: ModelInputs,
        previous: Int32Array,
        await_allowed: Callable[[], AllowedTokens] | None,
    ) -> StepOutput:
        logits = self._forward(inputs) if self.hidden_states is None else self._keep_states(inputs, self.hidden_states)
        self._export(step.exports)
        step = self._with_allowed_tokens(step, await_allowed)
        samples = logits[: step.sampling.num_samples]
        return sample(step.step, samples, step.sampling, previous, self._choose_tokens)

    def _submit(
        self,
        step: StepInput,
        inputs: ModelInputs,
        latest: Int32Array | StartedStep,
        await_allowed: Callable[[], AllowedTokens] | None,
    ) -> StartedStep:
        on_device = self._tokens is not None and self._tokens.computes(inputs)
        given_ids = None
        if isinstance(latest, StartedStep) and int(step.token_ids.min()) < 0:
            if on_device and latest.keeps_tokens:
                given_ids = step.token_ids
            else:
                inputs, _ = _resolved(step, inputs, latest)
        computed = self._computed(inputs, given_ids, None if step.allowed_follow else step.sampling)
        self._export(step.exports)
        num_samples = step.sampling.num_samples

        def sample_on_host(logits: Float32Array) -> StepOutput:
            previous = latest.output().token_ids if isinstance(latest, StartedStep) else latest
            given = self._with_allowed_tokens(step, await_allowed)
            return sample(step.step, logits[:num_samples], given.sampling, previous, self._choose_tokens)

        def take_tokens(chosen: Float32Array) -> StepOutput:
            if (tokens := tokens_of(chosen)) is None:
                return sample_on_host(computed.copy())
            return output_of_tokens(step.step, tokens[:num_samples])

        if self._tokens is not None and (chosen := self._tokens.choose(computed)) is not None:
            return StartedStep(HostCopy(chosen), take_tokens, num_samples, keeps_tokens=True)
        return StartedStep(HostCopy(computed.logits), sample_on_host, num_samples)

    def _export(self, exports: Int32Array) -> None:
        if len(exports):
            self._guard.start_exports(exports)
            self.kv_tensors.move_blocks(exports)
            self._guard.finish_exports(exports)

    def _with_allowed_tokens(self, step: StepInput, await_allowed: Callable[[], AllowedTokens] | None) -> StepInput:
        if not step.allowed_follow:
            return step
        assert await_allowed is not None
        sampling = step.sampling.with_allowed_tokens(await_allowed())
        check_allowed(sampling, self._limits.vocab_size)
        return structs.replace(step, sampling=sampling)

    def _results(self, step: StepInput, states: Float32Array, previous: Int32Array) -> StepOutput:
        num_samples, num_scored = step.sampling.num_samples, step.scoring.num_results
        vectors = states[num_samples + num_scored :]
        if self.spec.network.num_labels:
            vectors = self.logits_of(vectors)
        vocab_size = self.spec.network.vocab
        logits = self.logits_of(states[:num_samples]) if num_samples else np.empty((0, vocab_size), np.float32)
        output = sample(step.step, logits, step.sampling, previous, self._choose_tokens)
        to_score = states[num_samples : num_samples + num_scored]
        scored = score(to_score, step.scoring, self.logits_of, vocab_size, self._choose_tokens)
        errors = {num_samples + index: error for index, error in scored.errors.items()}
        for index in np.flatnonzero(~np.isfinite(vectors).all(axis=1)).tolist():
            errors[num_samples + num_scored + index] = "the model's last hidden state is not finite"
        errors = output.row_errors | _first_error_per_row(errors, step.result_tokens)
        return structs.replace(output, row_errors=errors, scores=scored.scores, vectors=vectors.copy())

    def logits_of(self, states: Float32Array) -> Float32Array:
        """Return the logits [P, V], or classification scores [P, labels], of hidden states [P, H]."""
        return self._head((states, *step_inputs_for_rows(len(states))))

    def _states_of(self, inputs: ModelInputs) -> Float32Array:
        network, arrays = self._states_network(inputs)
        return network(arrays)

    def _states_network(self, inputs: ModelInputs) -> tuple[StepNetwork, Sequence[Int32Array]]:
        if self._prompts is None or not inputs.are_whole_prompts or inputs.num_rows > self._num_prompt_rows:
            return self._states, self._planned(inputs).arrays()
        return self._prompts, inputs.padded_to(self._num_prompt_rows).arrays()

    def _pooled_states_of(self, inputs: ModelInputs, result_tokens: Int32Array) -> Float32Array:
        if (counts := num_states_per_result(result_tokens)) is None:
            return self._states_of(inputs)
        return means(self._states_of(with_all_states(inputs, counts)), counts)

    def _planned(self, inputs: ModelInputs) -> ModelInputs:
        multiple = self._backend.attention_rows
        return inputs.with_token_rows(multiple) if multiple else inputs

    def _forward(self, inputs: ModelInputs) -> Float32Array:
        if self._network is not None:
            return self._network(self._planned(inputs).arrays())
        if self._tokens is not None:
            return self._computed(inputs).copy()
        network, arrays = self._states_network(inputs)
        return self._head((network.submit(arrays), *step_inputs_for_rows(len(inputs.selected_indices))))

    def _keep_states(self, inputs: ModelInputs, kept: HiddenStates) -> Float32Array:
        """Return the logits of a step, and keep the hidden states of each row's newest tokens for draft tokens."""
        indices = newest_tokens(inputs.query_lens)
        states = self._states_of(replace(inputs, sample_indices=indices))
        kept.keep(inputs.slot_mapping[indices], states)
        return self.logits_of(states[np.searchsorted(indices, inputs.selected_indices)])

    def _computed(
        self, inputs: ModelInputs, given_ids: Int32Array | None = None, sampling: SamplingInput | None = None
    ) -> DeviceLogits:
        assert self._tokens is not None
        if self._tokens.computes(inputs):
            return self._tokens.submit(inputs, given_ids, sampling)
        network, arrays = self._states_network(inputs)
        return DeviceLogits(
            self._head.submit((network.submit(arrays), *step_inputs_for_rows(len(inputs.selected_indices))))
        )


def _resolved(step: StepInput, inputs: ModelInputs, latest: StartedStep) -> tuple[ModelInputs, Int32Array]:
    tokens = latest.output().token_ids
    return replace(inputs, token_ids=resolve_token_ids(step.token_ids, tokens)), tokens


def _first_error_per_row(errors: dict[int, str], result_tokens: Int32Array) -> dict[int, str]:
    first: dict[tuple[int, int], int] = {}
    for index in sorted(errors):
        row, _, kind = result_tokens[index].tolist()
        first.setdefault((row, kind), index)
    return {index: errors[index] for index in first.values()}
