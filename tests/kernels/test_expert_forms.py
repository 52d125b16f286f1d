"""Other forms of experts in `program`: without gates, and with weighted input."""

import numpy as np
import pytest
from llm_serving.network.experts import Expert, ExpertRouting
from support.kernel_calls import FLOAT_TYPES, ROUNDING_UNIT, assert_close, typed
from support.kernels import reference
from support.single_operations import random, result_of


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_program_experts_without_gates(isa: str, dtype: str) -> None:
    x, rng = random(30, 64, dtype), np.random.default_rng(6)
    up, down = (typed(rng.standard_normal((5, *shape)) / 8, dtype).values for shape in ((40, 64), (64, 40)))
    router = typed(rng.standard_normal((5, 64)), dtype).values
    names = [Expert("", f"{i}.up", f"{i}.down") for i in range(5)]
    arrays = {"router.weight": router, "0.up.weight": np.zeros((5, 48, 64)), "0.down.weight": np.zeros((5, 64, 48))}
    arrays["0.up.weight"][:, :40], arrays["0.down.weight"][..., :40] = up, down
    arrays |= {name: arrays[name].reshape(-1, arrays[name].shape[-1]) for name in ("0.up.weight", "0.down.weight")}
    routing = ExpertRouting(2, function="relu2")
    y = result_of(x, 64, lambda net, whole: net.experts(whole, "router", routing, names, 40), arrays)
    shares, chosen = reference.route(reference.linear(x.values, router), 2)
    expected = np.zeros((30, 64))
    for row, experts in enumerate(chosen):
        for share, expert in zip(shares[row], experts, strict=True):
            inner = np.maximum(up[expert] @ x.values[row], 0) ** 2
            expected[row] += share * (down[expert] @ inner)
    assert_close(typed(y.array, dtype), expected, 40 * ROUNDING_UNIT[dtype] + 1e-4)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_program_weights_the_input_of_experts(isa: str, dtype: str) -> None:
    """The router's logits are the first columns; one expert of each row gets the weighted row."""
    x, rng = random(30, 64, dtype), np.random.default_rng(6)
    gate_up, down = (typed(rng.standard_normal((3, *shape)) / 8, dtype).values for shape in ((96, 64), (64, 48)))
    names = [Expert(f"{i}.gate", f"{i}.up", f"{i}.down") for i in range(3)]
    arrays = {"router.weight": np.eye(3, 64), "0.gate.weight": gate_up.reshape(-1, 64)}
    arrays["0.down.weight"] = down.reshape(-1, 48)
    routing = ExpertRouting(1, "sigmoid", normalise=False, scales_input=True)
    y = result_of(x, 64, lambda net, whole: net.experts(whole, "router", routing, names, 48), arrays)
    weights, chosen = reference.route(x.values[:, :3], 1, sigmoid=True, normalise=False)
    scaled = typed(x.values * weights, dtype).values
    expected = reference.experts(scaled, np.ones((30, 1)), chosen, gate_up, down)
    assert_close(typed(y.array, dtype), expected, 40 * ROUNDING_UNIT[dtype] + 1e-4)
