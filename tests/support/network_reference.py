"""Reference implementation of each operation of a network description, in NumPy and float32.

Sums run over the last axis in one order, so the bits of a row depend on that row alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llm_serving.network.builder import Network
from llm_serving.network.operations import SIGNATURES, Operation, Value, Weight
from llm_serving.network.program import FLOATS, FUNCTIONS, KINDS, SCORES, Program
from support.kernels import reference
from support.kernels.reference import Sequences, all_reduce
from support.weights import Tensors, load_parameter

Array = np.ndarray[Any, Any]
_WRITTEN = ("y", "residual_out", "topk_weights", "topk_ids", "selected")
"""Roles of outputs: at even positions the first output of an operation, at odd positions the second."""


@dataclass
class Step:
    """Packed tokens of several requests in one step, and the KV caches that the step reads and writes."""

    token_ids: Array
    positions: Array
    slot_mapping: Array
    block_tables: Array
    query_lens: Array
    context_lens: Array
    sample_indices: Array
    caches: list[tuple[Array, Array]] = field(default_factory=list)  # [num_blocks, block_size, kv_heads, width]
    states: list[Array] = field(default_factory=list)  # [slots, ...]
    state_in: Array = field(default_factory=lambda: np.full(1, -1))
    state_out: Array | None = None  # None: no row stores its state

    @property
    def sequences(self) -> Sequences:
        none = np.full(len(self.token_ids), -1)
        return Sequences(self.query_lens, self.state_in, none if self.state_out is None else self.state_out)


def step_of_prompt(tokens: list[int], network: Network, every: bool = False) -> Step:
    """Return a step of one prompt, in one block of a new cache, with logits of the last token or of every token."""
    count = len(tokens)
    caches = [
        (
            np.zeros((1, count, c.kv_heads, c.key_width), np.float32),
            np.zeros((1, count, c.kv_heads, c.value_width), np.float32),
        )
        for c in network.caches
    ]
    at = np.arange(count)
    one = np.array([count])
    states = [np.zeros((1, *each.shape), np.float32) for each in network.states]
    return Step(np.array(tokens), at, at, np.zeros((1, 1), int), one, one, at if every else at[-1:], caches, states)


def parameters(network: Network, tensors: Tensors, num_positions: int) -> dict[Weight, Array]:
    """Return each parameter once, as float32."""
    return {each: np.asarray(_to_float32(load_parameter(each, tensors, num_positions))) for each in network.weights}


def run(operations: list[Operation], weights: dict[Weight, Array], step: Step) -> Array:
    """Return the float32 logits [S, V] of a step."""
    (logits,) = run_ranks([operations], [weights], [step])
    return logits


def run_ranks(
    operations: Sequence[list[Operation]], weights: Sequence[dict[Weight, Array]], steps: Sequence[Step]
) -> list[Array]:
    """Return the logits as `run` does, of several ranks with their own operations, weights and caches."""
    values: list[dict[Value, Array]] = [{} for _ in operations]

    def read(rank: int, value: Value) -> Array:
        return values[rank][value.root][:, value.start : value.start + value.width]

    results: list[Any] = []
    for together in zip(*operations, strict=True):
        results = []
        if together[0].kind == "all_reduce":
            total = all_reduce([read(rank, each.inputs["x"]) for rank, each in enumerate(together)])
            results = [total] * len(together)
        for rank, each in enumerate(together if not results else ()):
            roles: dict[str, Any] = {role: read(rank, value) for role, value in each.inputs.items()}
            roles |= {role: weights[rank][weight] for role, weight in each.weights.items()}
            results.append(globals()[f"_{each.kind}"](steps[rank], **roles, **each.attributes))
        if together[0].kind == "lm_head":
            results = [np.concatenate(results, axis=1)] * len(together)
        for rank, each in enumerate(together):
            written = results[rank] if isinstance(results[rank], tuple) else (results[rank],)
            for role, y in each.outputs.items():
                values[rank][y] = written[_WRITTEN.index(role) % 2]
    return results


def run_program(program: Program, weights: Sequence[Array], step: Step) -> Array:
    """Return the logits as `run` does, from the program's integers and one memory, whose unwritten parts are NaN."""
    rows = -(-max(len(step.token_ids), len(step.sample_indices)) // 16) * 16
    memory = np.full(rows * program.instructions[0, 3] // 4, np.nan, np.float32)

    def operand(number: int) -> Array:
        offset, columns, start, width, is_selected, kind = program.operands[number]
        count = len(step.sample_indices if is_selected else step.token_ids)
        first = offset * rows // 4
        buffer = memory[first : first + count * columns].reshape(count, columns)
        return (buffer.view(np.int32) if kind == 2 else buffer)[:, start : start + width]

    for instruction in program.instructions[1:].tolist():
        kind = KINDS[instruction[0]]
        signature, words = SIGNATURES[kind], iter(instruction[1:])
        written = [next(words) for _ in signature.outputs]
        roles: dict[str, Any] = {role: operand(n).copy() for role in signature.inputs if (n := next(words)) >= 0}
        roles |= {role: weights[n] for role in signature.weights if (n := next(words)) >= 0}
        attributes = {role: _of_word(role, next(words)) for role in signature.attributes}
        result = globals()[f"_{kind}"](step, **roles, **attributes)
        for number, y in zip(written, result if isinstance(result, tuple) else (result,), strict=False):
            if number >= 0:
                operand(number)[:] = y
    logits: Array = result
    return logits


def _of_word(role: str, word: int) -> Any:
    if role in FLOATS:
        return float(np.int32(word).view(np.float32))
    return (FUNCTIONS if role == "function" else SCORES)[word] if role in ("function", "score") else word


def _to_float32(array: Array) -> Array:
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32)


def _embedding(
    step: Step, table: Array, scale: float, first: int, rows: int, of_positions: bool, rounded_scale: bool = False
) -> Array:
    of_all = np.zeros((rows or len(table), table.shape[1]), np.float32)
    of_all[first : first + len(table)] = table
    return of_all[step.positions if of_positions else step.token_ids] * np.float32(scale)


def _select_rows(step: Step, x: Array) -> Array:
    return x[step.sample_indices]


def _linear(
    step: Step, x: Array, weight: Array, function: str, scale: float, tiled: bool, heads: int,
    bias: Any = None, residual: Any = None, consumer: Any = None,
) -> Array:  # fmt: skip
    y = _product(x, weight) if heads == 1 else _of_heads(x, weight.reshape(heads, -1, weight.shape[1]))
    y = y if bias is None else y + bias
    y = _gated_activation(step, y, function) if function else y
    return y if residual is None else _add(step, residual, y, scale)


def _rms_norm(
    step: Step, x: Array, gamma: Array, eps: float, group: int, centred: bool = False, beta: Any = None,
    residual: Any = None, consumer: Any = None,
) -> tuple[Array, Array]:  # fmt: skip
    x = x if residual is None else x + residual
    groups = x.reshape(len(x), -1, group or x.shape[1])
    groups = groups - np.mean(groups, axis=-1, keepdims=True) if centred else groups
    rstd = 1 / np.sqrt(np.mean(groups * groups, axis=-1, keepdims=True) + np.float32(eps))
    y = groups * rstd * gamma.reshape(-1, groups.shape[-1])
    return (y if beta is None else y + beta.reshape(-1, groups.shape[-1])).reshape(x.shape), x


def _rope(step: Step, x: Array, cos: Array, sin: Array, bias: Any = None, offset: Any = None) -> Array:
    heads = (x if bias is None else x + bias).reshape(len(x), -1, cos.shape[1])
    low, high = np.split(heads, 2, axis=-1)
    rotated = heads * cos[step.positions][:, None] + np.concatenate([-high, low], -1) * sin[step.positions][:, None]
    result = rotated.reshape(x.shape)
    return result if offset is None else result - offset


def _store_kv(step: Step, k: Array, v: Array, layer: int, layer_group: int = 0) -> None:
    kept = step.slot_mapping >= 0
    for rows, cache in zip((k, v), step.caches[layer], strict=True):
        cache.reshape(-1, rows.shape[1])[step.slot_mapping[kept]] = rows[kept]


def _attention(
    step: Step, q: Array, layer: int, scale: float, window: int, cap: float, eps: float, causal: bool,
    q_rope: Any = None, k: Any = None, v: Any = None, selected: Any = None, slopes: Any = None, cos: Any = None,
    sin: Any = None,
    q_gamma: Any = None, k_gamma: Any = None, k_bias: Any = None, k_offset: Any = None, sinks: Any = None,
    consumer: Any = None, chunk: int = 0, layer_group: int = 0,
) -> Array:  # fmt: skip
    if k is not None:
        if q_gamma is not None:
            q, k = _rms_norm(step, q, q_gamma, eps, len(q_gamma))[0], _rms_norm(step, k, k_gamma, eps, len(k_gamma))[0]
        if cos is not None:
            q, k = _rope(step, q, cos, sin), _rope(step, k, cos, sin, k_bias, k_offset)
        _store_kv(step, k, v, layer)
    first, second = step.caches[layer]
    kv_heads, width = first.shape[2:]
    result = []
    for b, table in enumerate(step.block_tables):
        keys, values = (part[table].reshape(-1, *part.shape[2:]) for part in (first, second))
        for i in range(step.query_lens[b]):
            row = len(result)
            stop = step.context_lens[b] - step.query_lens[b] + i + 1
            last = stop if causal else step.context_lens[b]
            last = min(last, stop + window - 1) if window else last
            seen: Any = slice((stop - 1) // chunk * chunk if chunk else max(0, stop - window) if window else 0, last)
            if selected is not None and stop > selected.shape[1]:
                seen = selected[row]
            scores = np.einsum("hgd,jhd->hgj", q[row].reshape(kv_heads, -1, width), keys[seen])
            read = values
            if q_rope is not None:
                rotated = q_rope[row].reshape(kv_heads, -1, second.shape[3])
                scores, read = scores + np.einsum("hgd,jhd->hgj", rotated, values[seen]), keys
            scores = scores * np.float32(scale)
            scores = np.float32(cap) * np.tanh(scores / np.float32(cap)) if cap else scores
            if slopes is not None:
                distance = np.arange(seen.start - stop + 1, 1, dtype=np.float32)
                scores = scores + slopes.reshape(kv_heads, -1, 1) * distance
            beside = np.full((*scores.shape[:2], 1), -np.inf, np.float32)
            beside = beside if sinks is None else sinks.reshape(beside.shape)
            largest = np.maximum(scores.max(-1, keepdims=True), beside)
            weights = np.exp(scores - largest)
            weights /= weights.sum(-1, keepdims=True) + np.exp(beside - largest)
            result.append(np.einsum("hgj,jhd->hgd", weights, read[seen]).reshape(-1))
    return np.stack(result)


def _select_keys(step: Step, q: Array, weights: Array, layer: int, top_k: int) -> Array:
    keys = step.caches[layer][0]
    result = []
    for table, num_rows, context in zip(step.block_tables, step.query_lens, step.context_lens, strict=True):
        of_request = keys[table].reshape(-1, keys.shape[3])
        for stop in range(context - num_rows + 1, context + 1):
            row = len(result)
            scores = reference.key_scores(q[row].reshape(len(weights[row]), -1), weights[row], of_request[:stop])
            result.append(reference.largest_positions(scores, top_k))
    return np.array(result, np.int32)


def _gated_activation(step: Step, x: Array, function: str) -> Array:
    gate, up = np.split(x, 2, axis=-1)
    if function == "clamped":
        gate, up = np.minimum(gate, np.float32(7)), np.clip(up, np.float32(-7), np.float32(7))
        return gate / (1 + np.exp(np.float32(-1.702) * gate)) * (up + 1)
    return _activation(step, gate, function) * up


def _activation(step: Step, x: Array, function: str) -> Array:
    if function == "tanh":
        return np.tanh(x)
    if function == "silu":
        return x / (1 + np.exp(-x))
    if function == "gelu":
        return x * np.vectorize(lambda each: (1 + math.erf(each / math.sqrt(2))) / 2, otypes=[np.float32])(x)
    return 0.5 * x * (1 + np.tanh(np.float32(0.7978845608) * (x + np.float32(0.044715) * x**3)))


def _add(step: Step, a: Array, b: Array, scale: float) -> Array:
    return a + b * np.float32(scale)


def _multiply(step: Step, a: Array, function: str, b: Any = None, gamma: Any = None) -> Array:
    if b is None:
        return a * gamma
    functions = {"": b, "relu": np.maximum(b, 0), "sigmoid": 1 / (1 + np.exp(-b)), "silu": b / (1 + np.exp(-b))}
    return a * functions[function]


def _causal_conv(step: Step, x: Array, taps: Array, function: str, state: int, bias: Any = None) -> Array:
    silu = {"": False, "silu": True}[function]
    y = reference.causal_conv(x, taps, bias, step.states[state], step.sequences, silu=silu)
    return y.astype(np.float32)


def _delta_rule(
    step: Step, q: Array, k: Array, v: Array, a: Array, b: Array, rates: Array, bias: Array, scale: float, eps: float,
    heads: int, state: int,
) -> Array:  # fmt: skip
    states = reference.matrices_of_states(step.states[state], v.shape[1] // a.shape[1])
    given = q, k, v, a, b, rates, bias, states, step.sequences
    y = reference.delta_rule(*given, key_heads=heads, scale=scale, eps=eps).astype(np.float32)
    step.states[state][...] = reference.states_of_matrices(states)
    return y


def _ssm(
    step: Step, x: Array, dt: Array, b: Array, c: Array, rates: Array, bias: Array, skip: Array, low: float,
    high: float, heads: int, state: int,
) -> Array:  # fmt: skip
    states = reference.matrices_of_states(step.states[state], x.shape[1] // dt.shape[1])
    given = x, dt, b, c, rates, bias, skip, states, step.sequences
    y = reference.ssm(*given, groups=heads, low=low, high=high).astype(np.float32)
    step.states[state][...] = reference.states_of_matrices(states)
    return y


def _mix_streams(
    step: Step, base: Array, x: Array, streams: int, offset: float, first: int, coefficients: Any = None
) -> Array:
    parts = x.reshape(len(x), -1, base.shape[1] // streams)
    given = np.zeros((len(x), streams, parts.shape[1]), np.float32) if coefficients is None else coefficients
    return reference.mix_streams(base, parts, given.reshape(len(x), streams, -1) + offset, first).astype(np.float32)


def _match_streams(step: Step, like: Array, x: Array, eps: float, sums: bool) -> Array:
    return reference.match_streams(like, x, float(np.float32(eps)), sums=bool(sums)).astype(np.float32)


def _sparsify(step: Step, x: Array, scale: float) -> Array:
    return reference.sparsify(x, float(np.float32(scale))).astype(np.float32)


def _sigmoid_gate(step: Step, x: Array, gate: Array) -> Array:
    return x / (1 + np.exp(-gate))


def _route(
    step: Step, x: Array, weight: Array, top_k: int, score: str, normalise: bool, scale: float, groups: int,
    top_groups: int, margin: float = 0.0, bias: Any = None, correction: Any = None, factors: Any = None,
) -> tuple[Array, Array]:  # fmt: skip
    logits = _product(x, weight) + (0 if bias is None else bias)
    if score == "sparsemixer":
        topk_weights, topk_ids = reference.route_by_sparse_mixer(logits, top_k, margin)
        return topk_weights.astype(np.float32) * np.float32(scale), topk_ids
    scores = 1 / (1 + np.exp(-logits))
    if score == "softmax":
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
    ranking = scores if correction is None else scores + correction
    if groups > 1:
        of_groups = ranking.reshape(len(x), groups, -1).copy()
        best = of_groups.max(-1) if correction is None else np.sort(of_groups, -1)[..., -2:].sum(-1)
        left_out = np.argsort(-best, axis=-1, kind="stable")[:, top_groups:]
        np.put_along_axis(of_groups, left_out[..., None], -np.inf, axis=1)
        ranking = of_groups.reshape(scores.shape)
    topk_ids = np.argsort(-ranking, axis=-1, kind="stable")[:, :top_k]
    topk_weights = np.take_along_axis(scores, topk_ids, -1)
    topk_weights = topk_weights / topk_weights.sum(-1, keepdims=True) if normalise else topk_weights
    return topk_weights * np.float32(scale) * (1 if factors is None else factors[topk_ids]), topk_ids


def _experts(
    step: Step, x: Array, topk_weights: Array, topk_ids: Array, gate_up: Array, down: Array, function: str,
    scale: float, experts: int, scales_input: bool = False, gate_up_bias: Any = None, down_bias: Any = None,
    residual: Any = None,
) -> Array:  # fmt: skip
    above = np.zeros((experts, 1), np.float32) if gate_up_bias is None else gate_up_bias.reshape(experts, -1)
    below = np.zeros((experts, 1), np.float32) if down_bias is None else down_bias.reshape(experts, -1)
    gate_up = gate_up.reshape(experts, -1, gate_up.shape[1])
    down = down.reshape(experts, -1, down.shape[1])
    y = np.zeros_like(x)
    for row, (row_weights, row_ids) in enumerate(zip(topk_weights, topk_ids, strict=True)):
        for at in np.argsort(row_ids):
            expert = row_ids[at]
            weight, factor = (row_weights[at], 1) if scales_input else (1, row_weights[at])
            inner = _product(weight * x[row : row + 1], gate_up[expert]) + above[expert]
            squared = function == "relu2"
            inner = np.maximum(inner, 0) ** 2 if squared else _gated_activation(step, inner, function)
            y[row] += factor * (_product(inner, down[expert])[0] + below[expert])
    return y if residual is None else _add(step, residual, y, scale)


def _lm_head(
    step: Step, x: Array, weight: Array, scale: float, cap: float, tiled: bool, first: int, rows: int, bias: Any = None
) -> Array:
    logits = (_product(x, weight) + (0 if bias is None else bias)) * np.float32(scale)
    return np.float32(cap) * np.tanh(logits / np.float32(cap)) if cap else logits


def _product(x: Array, weight: Array) -> Array:
    return np.stack([(row * weight).sum(-1) for row in x])


def _of_heads(x: Array, weight: Array) -> Array:
    return (x.reshape(len(x), len(weight), 1, -1) * weight).sum(-1).reshape(len(x), -1)
