"""Draft tokens from the model's own layer for multi-token prediction, MTP (`models.mtp`).

The layer reads the hidden states that the model computed for the newest tokens of a request. It shares embedding and LM
head with the model, and samples as a draft model does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from llm_serving.backends.base import Backend
from llm_serving.core.step import (
    DRAFT_WINDOW,
    MAX_DRAFT_REQUESTS,
    MAX_DRAFT_TOKENS,
    DraftRequest,
    Float32Array,
    StepInput,
    blocks_per_draft_request,
    no_block_moves,
)
from llm_serving.errors import ModelError
from llm_serving.lowering.lower import LoweredMtp, lower_mtp
from llm_serving.models.memory import KEPT_STATES
from llm_serving.models.weight_reader import WeightReader, mtp_layer
from llm_serving.network.quantization import Quantization
from llm_serving.worker.compiled_graph import CompiledNetwork
from llm_serving.worker.draft_model import DraftModel, DraftRow
from llm_serving.worker.hidden_states import HiddenStates
from llm_serving.worker.kv_cache import KVTensors
from llm_serving.worker.model_inputs import NO_TOKENS, ModelLimits, build_model_inputs
from llm_serving.worker.model_runner import ModelRunner
from llm_serving.worker.sampler import ChooseTokens, choose_tokens_for, sample

MAX_TOKENS: Final = DRAFT_WINDOW + MAX_DRAFT_TOKENS


def load_mtp(
    runner: ModelRunner,
    folder: Path,
    backend: Backend,
    quantization: Quantization | None,
    on_weights: Callable[[int, int], None] | None = None,
) -> MtpModel:
    """Load the MTP layer of the model of `runner`, which then keeps hidden states.

    The arguments are those of the runner. Raise ModelError if the model runs as Cells, or if the folder lacks the
    layer.
    """
    if backend.program() is None or not runner.runs_program:
        raise ModelError("scheduler_config.speculative_method: mtp needs the kernels of `kernels: program` on a CPU")
    reader = WeightReader(folder, runner.spec.scheme, on_weights)
    layer = mtp_layer(runner.spec, reader, folder)
    reader.expect_only(layer.tensors)
    tensors, size = runner.kv_tensors, runner.kv_tensors.block_size
    cache = KVTensors.allocate(layer, backend, MAX_DRAFT_REQUESTS * blocks_per_draft_request(size), size)
    networks = runner.spec.network, layer.network
    lowered = lower_mtp(*networks, backend, reader, cache.layers, runner.max_positions, quantization, runner.parameters)
    num_entries = min(tensors.num_blocks, -(-KEPT_STATES // size))
    states = HiddenStates(num_entries, tensors.num_blocks, size, layer.network.hidden, backend.dtype)
    model = MtpModel(runner, lowered, states, choose_tokens_for(backend.name))
    model.warm_up()
    runner.hidden_states = states
    return model


class MtpModel(DraftModel):
    """Runs the MTP layer of the model of `runner`, in its thread.

    A row is a token and the hidden state of the token before it. If that token is a draft, the hidden state is
    the layer's own.
    """

    def __init__(
        self, runner: ModelRunner, lowered: LoweredMtp, states: HiddenStates, choose_tokens: ChooseTokens
    ) -> None:
        super().__init__(runner, runner.spec.vocab_size)
        self._states = states
        self._embedding, self._layer = CompiledNetwork(lowered.embedding), CompiledNetwork(lowered.states)
        self._choose_tokens = choose_tokens
        size = runner.kv_tensors.block_size
        blocks = MAX_DRAFT_REQUESTS * self.blocks_per_request
        self._limits = ModelLimits(runner.spec.vocab_size, MAX_TOKENS, blocks, size)
        self._given: dict[int, Float32Array] = {}

    def warm_up(self) -> None:
        slots = np.arange(1, dtype=np.int32)
        self._states.keep(slots, np.zeros((1, self._runner.spec.network.hidden), np.float32))
        self.propose([DraftRequest(0, 0, [0, 0], 1, 0.0, 0, 1.0, 0.0, 0, [0])])
        self._states.drop(no_block_moves(), slots)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Do the same as `DraftModel.propose`. A request whose hidden states are not kept gets no draft tokens."""
        self._given = {}
        requests = [self._with_states(index, request) for index, request in enumerate(requests)]
        proposed = super().propose(requests)
        for request in requests:
            # The next proposal computes draft tokens that were accepted again, from the model's own hidden states.
            if (slot := self._slots.get(request.key)) is not None and request.token_ids:
                del slot.token_ids[len(request.token_ids) :]
        return proposed

    def _with_states(self, index: int, request: DraftRequest) -> DraftRequest:
        """Return the request without the tokens that follow a token whose hidden state is not stored."""
        token_ids, offset = request.token_ids, request.start % self._limits.block_size
        if not 1 < len(token_ids) <= DRAFT_WINDOW or not request.block_ids:
            return request._replace(token_ids=[])
        states = self._given[index] = self._states.read(request.block_ids, offset, len(token_ids) - 1)
        first = len(token_ids) - len(states)
        return request._replace(start=request.start + first, token_ids=token_ids[first:])

    def _choose(self, step: StepInput, rows: Sequence[DraftRow]) -> list[int]:
        inputs = build_model_inputs(step, NO_TOKENS, self._limits)
        every = np.arange(step.num_tokens, dtype=np.int32)
        embedded = self._embedding(replace(inputs, sample_indices=every).arrays())
        before = [self._given[row.number][row.num_cached - len(row.slot.token_ids) :] for row in rows]
        given = np.concatenate([embedded, np.concatenate(before)], axis=1)
        states = self._layer((given, *replace(inputs, token_ids=every).arrays())).copy()
        for row, state in zip(rows, states, strict=True):
            self._given[row.number] = state[None]
        logits = self._runner.logits_of(states)
        output = sample(step.step, logits, step.sampling, NO_TOKENS, self._choose_tokens)
        token_ids: list[int] = output.token_ids.tolist()
        return token_ids
