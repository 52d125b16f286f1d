"""Operations with states as programs of one operation, whose input rows are the rows of an embedding table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llm_serving.kernels import library
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value
from support.decoder_calls import Step
from support.kernel_calls import Array, Typed, typed
from support.kernels.reference import Sequences
from support.program_calls import Runnable, States, run, runnable_of

Reference = Callable[[Array, Array, Sequences], Array]
"""(rows [T, width of x], states [slots, ...], which it changes, sequences) -> [T, width of y]"""


@dataclass(frozen=True)
class StateOperation:
    """An operation with one state.

    Attributes:
        x_width, y_width: Columns of its input rows, and of its result.
        body: (network, input rows) -> its result.
        arrays: Values of its weights by tensor name, without the table and the LM head.
        reference: What it must compute.
    """

    x_width: int
    y_width: int
    body: Callable[[Network, Value], Value]
    arrays: dict[str, Array]
    reference: Reference

    def runnable(self, x: Typed) -> Runnable:
        net = Network(self.x_width, len(x.array))
        y = self.body(net, net.embedding("x"))
        net.lm_head(y, "one")
        given = {"x.weight": x.values, "one.weight": np.eye(self.y_width), **self.arrays}
        values = {}
        for weight in net.weights:
            array = given[weight.names[0]].astype(np.float32)
            values[weight] = array if weight.transform is None else weight.transform(array)
        with library.use_isa("plain"):  # which keeps weights as they are
            return runnable_of(net, values, x.dtype)


@dataclass
class Part:
    """Consecutive rows of a sequence in a step."""

    rows: Sequence[int]
    slot: int = -1
    """Slot of the state before the rows."""
    stores: dict[int, int] = field(default_factory=dict)
    """Index of a row of the part -> slot that gets the state after it."""


def sequences_of(parts: Sequence[Part]) -> Sequences:
    stores = [part.stores.get(index, -1) for part in parts for index in range(len(part.rows))]
    lens = np.array([len(part.rows) for part in parts])
    return Sequences(lens, np.array([part.slot for part in parts]), np.array(stores, int))


def run_parts(runnable: Runnable, parts: Sequence[Part], states: States) -> list[Typed]:
    """Run one step; return the results of each part."""
    rows = [row for part in parts for row in part.rows]
    given = sequences_of(parts)
    lens, nothing = given.query_lens.tolist(), [0] * len(rows)
    step = Step(rows, nothing, [-1] * len(rows), [[0]] * len(parts), lens, lens, list(range(len(rows))))
    y = run(runnable, step, [], states.at(given.state_in.tolist(), given.state_out.tolist()))
    ends = np.cumsum(lens)
    return [y.rows(slice(end - length, end)) for end, length in zip(ends, lens, strict=True)]


def drawn(shape: tuple[int, ...], seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


def random_rows(operation: StateOperation, count: int, dtype: str, seed: int = 1) -> Typed:
    return typed(drawn((count, operation.x_width), seed), dtype)


def random_states(runnable: Runnable, operation: StateOperation, num_slots: int, dtype: str) -> States:
    """Return states computed from random rows, so that they have realistic values."""
    states = States.of(runnable, num_slots)
    x = random_rows(operation, 2 * num_slots, dtype, seed=99)
    parts = [Part([2 * slot, 2 * slot + 1], stores={1: slot}) for slot in range(num_slots)]
    run_parts(operation.runnable(x), parts, states)
    return states


def copied(states: States) -> States:
    return States([Typed(each.array.copy(), each.dtype) for each in states.arrays], [], [])


def values_of(given: Any) -> Array:
    return np.asarray(given, dtype=np.float64)
