"""Networks as calls of the operator `program`, in the way in which MindSpore calls it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from llm_serving.kernels import library
from llm_serving.kernels.library import AddressTable
from llm_serving.network.builder import Network
from llm_serving.network.caches import CacheShape, StateShape
from llm_serving.network.operations import Weight
from llm_serving.network.program import Program, build_program
from llm_serving.network.rope import Rotary
from support.decoder_calls import EPS, NUM_HEADS, NUM_KV_HEADS, VOCAB, Decoder, Step
from support.kernel_calls import Typed, empty, integers, packed, status_of, typed
from support.kernels_cache import SCALE, Cache, padded

BLOCK_SIZE = 16
_program_of = functools.cache(build_program)
_MULTIPLIED = frozenset({"weight", "gate_up", "down"})


@dataclass(frozen=True)
class Runnable:
    """A program, and the weights to which its numbers refer."""

    program: Program
    weights: list[Typed]
    dtype: str
    caches: list[CacheShape] = field(default_factory=list)
    states: list[StateShape] = field(default_factory=list)

    @property
    def vocab(self) -> int:
        return int(self.weights[0].array.shape[0])


@dataclass
class Blocks:
    """Keys and values of a layer."""

    key: Typed
    value: Typed

    @classmethod
    def of(cls, shape: CacheShape, dtype: str, num_blocks: int = 24) -> Blocks:
        widths = shape.key_width, shape.value_width
        return cls(*(typed(np.zeros((num_blocks, BLOCK_SIZE, shape.kv_heads, width)), dtype) for width in widths))


@dataclass
class States:
    """The states of a program, and the slots that a step uses."""

    arrays: list[Typed]
    state_in: list[int]
    state_out: list[int]

    @classmethod
    def of(cls, runnable: Runnable, num_slots: int = 8) -> States:
        """States that are NaN everywhere, so that reading an unwritten slot fails a test."""
        shapes = [(num_slots, *each.shape) for each in runnable.states]
        return cls([typed(np.full(shape, np.nan), "float32") for shape in shapes], [], [])

    def at(self, state_in: list[int], state_out: list[int]) -> States:
        return States(self.arrays, state_in, state_out)


def create_caches(runnable: Runnable, num_blocks: int = 24) -> list[Blocks]:
    return [Blocks.of(shape, runnable.dtype, num_blocks) for shape in runnable.caches]


def runnable_of(network: Network, arrays: Mapping[Weight, Any], dtype: str) -> Runnable:
    """Return the program of a network with these weights; those of products are packed."""
    program = _program_of(network, dtype)
    multiplied = {weight for each in network.operations for role, weight in each.weights.items() if role in _MULTIPLIED}

    def given(weight: Weight) -> Typed:
        value = typed(np.ascontiguousarray(arrays[weight]), dtype if weight.dtype == "model" else weight.dtype)
        # The address may have belonged to a packed weight that was freed.
        library.load().llm_release_weight(value.array.ctypes.data)
        return packed(value) if weight in multiplied else value

    weights = [given(weight) for weight in program.weights]
    return Runnable(program, weights, dtype, list(network.caches), list(network.states))


def parameters(
    runnable: Runnable, step: Step, caches: Sequence[Blocks | Cache], states: States | None = None
) -> dict[str, Typed]:
    """Return the parameters of `program`, in its order. `states`: None: unused ones are allocated if the program has
    states.
    """
    program = runnable.program
    given = {
        "instructions": integers(program.instructions),
        "operands": integers(program.operands),
        "token_ids": integers(step.token_ids),
        "positions": integers(step.positions),
        "slot_mapping": integers(step.slots),
        "block_tables": padded(step.tables),
        "query_lens": integers(step.query_lens),
        "context_lens": integers(step.context_lens),
        "sample_indices": integers(step.samples),
    }
    given |= {f"weight{i}": weight for i, weight in enumerate(runnable.weights)}
    for i, cache in enumerate(caches):
        given |= {f"key{i}": cache.key, f"value{i}": cache.value}
    if runnable.states:
        states = states or States.of(runnable).at([-1] * len(step.query_lens), [-1] * len(step.token_ids))
        given |= {f"state{i}": array for i, array in enumerate(states.arrays)}
        given |= {"state_in": integers(states.state_in), "state_out": integers(states.state_out)}
    return given | {"result": empty((len(step.samples), runnable.vocab), "float32")}


def status_of_program(given: Mapping[str, Typed], changes: Mapping[tuple[int, int], int] = {}) -> int:
    """Call `program`, whose inputs are addresses; return 0 for success.

    Args:
        given: From `parameters`.
        changes: (row, column) -> new value in the table of addresses.
    """
    table = AddressTable(len(given))
    for number, parameter in enumerate(given.values()):
        table.set_view(number, parameter.array)
    for offset, value in changes.items():
        table.memory[offset] = value
    return status_of("program", Typed(table.memory, "int64"), empty((1,), "float32"))


def run(runnable: Runnable, step: Step, caches: Sequence[Blocks | Cache], states: States | None = None) -> Typed:
    """Return the logits of the rows that sample."""
    given = parameters(runnable, step, caches, states)
    assert status_of_program(given) == 0, library.last_error()
    return given["result"]


def llama_of(decoder: Decoder) -> Runnable:
    """Return the network of a decoder as a program with the same weights."""
    head_dim, hidden = decoder.cos.array.shape[1], decoder.gain.array.size
    widths = [heads * head_dim for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
    rotary = Rotary(head_dim, head_dim, 10000.0)
    tied = decoder.table is decoder.head
    net = Network(hidden, VOCAB, EPS)
    x = net.embedding("head" if tied else "table")
    values = {"table": decoder.table, "head": decoder.head, "gain": decoder.gain}
    for i, layer in enumerate(decoder.layers):
        of_layer = {"gain": layer.gain, "mlp_gain": layer.mlp_gain, "qkv": layer.qkv, "out": layer.out}
        of_layer |= {"gate_up": layer.gate_up, "down": layer.down}
        values |= {f"{i}.{name}": value for name, value in of_layer.items()}
        biases = {"qkv": layer.qkv_bias, "out": layer.out_bias, "gate_up": layer.gate_up_bias, "down": layer.down_bias}
        values |= {f"{i}.{name}.bias": value for name, value in biases.items() if value is not None}
        inner = layer.down.array.shape[1]
        attention_bias, mlp_bias = layer.qkv_bias is not None, layer.gate_up_bias is not None
        qkv = net.linear(net.rms_norm(x, f"{i}.gain"), f"{i}.qkv", sum(widths), bias=attention_bias)
        q, k, v = net.split(qkv, *widths)
        stored = net.store_kv(net.rope(k, rotary), v, NUM_KV_HEADS)
        attended = net.attention(net.rope(q, rotary), stored, scale=SCALE)
        x = net.add(x, net.linear(attended, f"{i}.out", hidden, bias=attention_bias))
        gate_up = net.linear(net.rms_norm(x, f"{i}.mlp_gain"), f"{i}.gate_up", 2 * inner, bias=mlp_bias)
        x = net.add(x, net.linear(net.gated_activation(gate_up, "silu"), f"{i}.down", hidden, bias=mlp_bias))
    net.lm_head(net.rms_norm(x, "gain"), "head")

    def given(weight: Weight) -> Typed:
        if weight.generate is not None:
            return decoder.cos if weight.generate.__name__ == "cos" else decoder.sin
        (name,) = weight.names
        return values[name if name.endswith(".bias") else name.removesuffix(".weight")]

    program = build_program(net, decoder.gain.dtype)
    return Runnable(program, [given(weight) for weight in program.weights], decoder.gain.dtype, list(net.caches))


def changed(runnable: Runnable, **parts: Any) -> Runnable:
    """Return the program with changed instructions or operands."""
    return replace(runnable, program=replace(runnable.program, **parts))
