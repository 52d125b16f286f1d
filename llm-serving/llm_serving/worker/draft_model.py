"""Draft tokens from a small model (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
2023), or from the served model's layer for multi-token prediction, MTP (`models.layers`).

Both sample a draft token with the random number that the request uses at the same position. So a draft token equals the
served model's token if the distributions are equal. The served model verifies each draft token, so answers do not
depend on them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from llm_serving.backends.base import Backend
from llm_serving.core.step import (
    DRAFT_WINDOW,
    MAX_DRAFT_REQUESTS,
    MAX_DRAFT_TOKENS,
    MAX_PROPOSED_TOKENS,
    NO_BLOCK_MOVES,
    SAMPLING_DTYPES,
    DraftRequest,
    Float32Array,
    ResultKind,
    SamplingInput,
    StepInput,
    blocks_per_draft_request,
)
from llm_serving.errors import ModelError
from llm_serving.lowering.lower import LoweredMtp, lower_mtp
from llm_serving.models.memory import KEPT_STATES
from llm_serving.models.weight_reader import WeightReader, mtp_layer
from llm_serving.network.quantization import Quantization
from llm_serving.worker.compiled_graph import CompiledNetwork
from llm_serving.worker.hidden_states import HiddenStates
from llm_serving.worker.kv_cache import KVTensors
from llm_serving.worker.model_inputs import NO_TOKENS, ModelLimits, build_model_inputs
from llm_serving.worker.model_runner import ModelRunner
from llm_serving.worker.sampler import ChooseTokens, choose_tokens_for, sample


class DraftSlot:
    """Cache blocks of the draft model for one request, and the tokens whose keys and values they hold."""

    def __init__(self, blocks: range) -> None:
        self.blocks = np.array(blocks, np.int32)
        self.start = 0
        self.token_ids: list[int] = []

    def switch_to(self, start: int, token_ids: list[int]) -> int:
        """Make `token_ids` the tokens of the slot, the first one at position `start`. Return how many of them, from the
        first, have keys and values in the slot. The last token does not count, because the draft model must compute it
        to propose the next one.
        """
        known = 0
        if start == self.start:
            for before, now in zip(self.token_ids, token_ids[:-1], strict=False):
                if before != now:
                    break
                known += 1
        self.start, self.token_ids = start, list(token_ids)
        return known


class DraftRow(NamedTuple):
    """A request in a step: its index `number`, its slot, and how many of its tokens, from the first, are cached."""

    number: int
    slot: DraftSlot
    num_cached: int


class DraftModel:
    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        """Only the thread of `runner` may call this object. It proposes only token ids below `vocab_size`."""
        self._runner = runner
        self._vocab_size = vocab_size
        self.blocks_per_request = count = blocks_per_draft_request(runner.kv_tensors.block_size)
        self._free = [DraftSlot(range(index * count, (index + 1) * count)) for index in range(MAX_DRAFT_REQUESTS)]
        self._slots: OrderedDict[int, DraftSlot] = OrderedDict()
        self._step = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Return up to `num_draft_tokens` draft tokens for each request, or none for a request that exceeds a limit."""
        proposed: list[list[int]] = [[] for _ in requests]
        try:
            rows = self._rows(requests)
            while rows:
                rows = self._extend(requests, rows, proposed)
        except Exception:
            self._free += self._slots.values()
            self._slots.clear()
            for slot in self._free:
                slot.token_ids = []
            raise
        return proposed

    def _rows(self, requests: Sequence[DraftRequest]) -> list[DraftRow]:
        rows, left = [], MAX_PROPOSED_TOKENS
        for index, request in enumerate(requests[:MAX_DRAFT_REQUESTS]):
            token_ids = request.token_ids
            if not (0 < len(token_ids) <= DRAFT_WINDOW and 0 < request.num_draft_tokens <= MAX_DRAFT_TOKENS):
                continue
            if not 0 <= min(token_ids) <= max(token_ids) < self._runner.spec.vocab_size:
                continue
            slot = self._slots.pop(request.key, None)
            if slot is None:
                slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
                slot.token_ids = []
            self._slots[request.key] = slot
            before = slot.start, slot.token_ids
            known = slot.switch_to(request.start, token_ids)
            if len(token_ids) - known > left:
                slot.start, slot.token_ids = before
                continue
            left -= len(token_ids) - known
            rows.append(DraftRow(index, slot, known))
        return rows

    def _extend(
        self, requests: Sequence[DraftRequest], rows: list[DraftRow], proposed: list[list[int]]
    ) -> list[DraftRow]:
        extended = [requests[index] for index, _, _ in rows]
        known = np.array([known for _, _, known in rows], np.int32)
        lens = np.array([len(slot.token_ids) for _, slot, _ in rows], np.int32)
        positions = [each.start + int(length) for each, length in zip(extended, lens, strict=True)]
        width = -(-int(lens.max()) // self._runner.kv_tensors.block_size)
        blocks = np.stack([slot.blocks[:width] for _, slot, _ in rows])
        step = StepInput(
            step=self._step,
            token_ids=np.concatenate([np.array(slot.token_ids[known:], np.int32) for _, slot, known in rows]),
            query_lens=lens - known,
            num_computed=known,
            block_tables=blocks,
            block_epochs=np.zeros_like(blocks),
            result_tokens=np.array(
                [(row, int(count) - 1, ResultKind.TOKEN) for row, count in enumerate(lens - known)], np.int32
            ),
            sampling=_sampling(extended, positions),
        )
        self._step += 1
        chosen = self._choose(step, rows)
        unfinished = []
        for (index, slot, _), token_id in zip(rows, chosen, strict=True):
            if not 0 <= token_id < self._vocab_size:
                continue
            proposed[index].append(token_id)
            if len(proposed[index]) < requests[index].num_draft_tokens:
                unfinished.append(DraftRow(index, slot, len(slot.token_ids)))
                slot.token_ids.append(token_id)
        return unfinished

    def _choose(self, step: StepInput, rows: Sequence[DraftRow]) -> list[int]:
        """Run `step` (the uncached tokens of `rows`). Return each row's next token, or -1 if none can be sampled."""
        token_ids: list[int] = self._runner.execute(step).token_ids.tolist()
        return token_ids


def _sampling(requests: Sequence[DraftRequest], positions: Sequence[int]) -> SamplingInput:
    given = {
        name: np.array([getattr(each, name) for each in requests], SAMPLING_DTYPES[name])
        for name in ("temperature", "top_k", "top_p", "min_p", "seed")
    }
    return SamplingInput.plain(len(requests), position=np.array(positions, np.int32), **given)


MAX_TOKENS: Final = DRAFT_WINDOW + MAX_DRAFT_TOKENS


def load_mtp(
    runner: ModelRunner,
    folder: Path,
    backend: Backend,
    quantization: Quantization | None,
    on_weights: Callable[[int, int], None] | None = None,
) -> MtpModel:
    """Load the MTP layer of the runner's model, or raise ModelError. The runner then keeps hidden states for it."""
    if backend.program() is None or not runner.runs_program:
        raise ModelError("scheduler_config.speculative_method: mtp needs `device_config.kernels: program` on a CPU")
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
    """Runs the MTP layer of the model of `runner`. The layer shares the model's embedding and LM head. For each token,
    the layer reads the token and the hidden state of the token before it. This state comes from the layer itself if the
    token before is a draft token, otherwise from the model.
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
        self._states.drop(NO_BLOCK_MOVES, slots)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Propose as `DraftModel.propose` does, but nothing for a request whose hidden states are not kept."""
        self._given = {}
        requests = [self._with_states(index, request) for index, request in enumerate(requests)]
        proposed = super().propose(requests)
        for request in requests:
            # The next proposal computes accepted draft tokens again, now from the hidden states of the model.
            if (slot := self._slots.get(request.key)) is not None and request.token_ids:
                del slot.token_ids[len(request.token_ids) :]
        return proposed

    def _with_states(self, index: int, request: DraftRequest) -> DraftRequest:
        """Return the request with its last tokens only: those for which the hidden state of the token before is
        available. Store these hidden states in `_given`.
        """
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
