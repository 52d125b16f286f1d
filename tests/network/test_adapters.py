from pathlib import Path

import numpy as np
import pytest
from llm_serving.formats.peft import read_adapter
from llm_serving.models.spec import ModelSpec
from llm_serving.network.adapters import experts_modules, panels, with_adapters
from llm_serving.network.builder import Network
from llm_serving.network.program import build_program
from llm_serving.network.weights import assemble_weight
from support.adapter_factories import EVERY, write_adapter
from support.family_configs import config_of
from support.model_factories import tiny_spec


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("targets", [EVERY, ("k_proj", "up_proj")])
def test_the_matrices_of_a_rank_change_its_part_of_each_weight(
    tmp_path: Path, num_ranks: int, targets: tuple[str, ...]
) -> None:
    whole = tiny_spec()
    expected = write_adapter(tmp_path, whole, targets=targets, rank=3)
    changes = read_adapter(tmp_path).modules
    for rank in range(num_ranks):
        _, linears = whole.of_rank(rank, num_ranks).with_adapters(2, 8, as_program=True)
        assert len(linears) == 2 * 4
        for linear in linears:
            parts = linear.matrices(changes)
            stacked = [
                expected.get(name, np.zeros(shape)).astype(np.float32)
                for name, shape in zip(linear.modules, linear.weight.stored_shapes, strict=True)
            ]
            change = sum(each.b @ each.a for each in parts)
            np.testing.assert_allclose(change, assemble_weight(linear.weight, stacked), atol=1e-6)
            assert [len(each.a) for each in parts] == [3 * (name in changes) for name in linear.modules]


def test_panels_hold_sixteen_rows_and_zeros_beyond_the_matrix() -> None:
    matrix = np.arange(18 * 3, dtype=np.float32).reshape(18, 3)
    result = panels(matrix, in_pairs=False)
    assert result.shape == (2, 16, 16)
    np.testing.assert_array_equal(result[1, :3, 1], matrix[17])
    assert not result[1, :, 2:].any()
    assert not result[:, 3:].any()
    pairs = panels(matrix, in_pairs=True).reshape(2, 8, 16, 2)
    np.testing.assert_array_equal(pairs[1, 0, 1], matrix[17, :2])
    np.testing.assert_array_equal(pairs[1, 1, 1], [matrix[17, 2], 0])


def test_each_linear_operation_but_the_head_has_slots() -> None:
    spec, linears = tiny_spec().with_adapters(3, 16, as_program=True)
    slots = [each.weights.get("a") for each in spec.network.operations if each.kind == "linear"]
    assert slots == [each.a for each in linears]
    assert spec.network.num_adapter_slots == 3
    assert linears[0].a.shape == (3, 3, 64, 16)
    assert linears[0].b.shape == (3, 8, 16, 16)
    assert linears[0].part_of_panel == (0,) * 4 + (1,) * 2 + (2,) * 2
    assert tiny_spec().network.num_adapter_slots == 0


def test_tensors_that_share_a_panel_are_one_part() -> None:
    net = Network(32, 60)
    net.lm_head(net.linear(net.embedding("x"), ("a", "b"), (20, 40)), "head")
    _, (linear,) = with_adapters(net, 3, 8, as_program=True)
    assert linear.part_of_panel == (0,) * 4
    assert linear.a.shape == (3, 2, 32, 16)
    assert linear.b.shape == (3, 4, 32, 16)


def test_slots_prevent_no_fusion() -> None:
    spec = tiny_spec()
    adapted, _ = spec.with_adapters(3, 16, as_program=True)
    plain, slots = (build_program(each.network, "bfloat16") for each in (spec, adapted))
    assert plain.instructions[0, 3] == slots.instructions[0, 3], "bytes of memory per row"
    np.testing.assert_array_equal(plain.instructions[1:, 0], slots.instructions[1:, 0])


def test_experts_and_routers_are_known_by_name() -> None:
    assert not experts_modules(tiny_spec().network)
    network = ModelSpec.from_hugging_face(config_of("qwen3, experts")).network
    assert {"model.layers.0.mlp.gate", "model.layers.1.mlp.experts.4.down_proj"} < set(experts_modules(network))
