from pathlib import Path

import numpy as np
import pytest
from llm_serving.formats.peft import read_adapter
from llm_serving.models.spec import ModelSpec
from llm_serving.network.adapters import LowRankChange, experts_modules, panels
from llm_serving.network.weights import assemble_weight
from support.adapter_factories import EVERY, write_adapter
from support.family_configs import config_of
from support.model_factories import tiny_spec


def changes_of(folder: Path) -> dict[str, LowRankChange]:
    modules = read_adapter(folder).modules.items()
    return {name: LowRankChange(each.a.read(), each.b.read(), each.scale) for name, each in modules}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("targets", [EVERY, ("k_proj", "up_proj")])
def test_the_matrices_of_a_rank_change_its_part_of_each_weight(
    tmp_path: Path, num_ranks: int, targets: tuple[str, ...]
) -> None:
    whole = tiny_spec()
    expected = write_adapter(tmp_path, whole, targets=targets, rank=3)
    changes = changes_of(tmp_path)
    for rank in range(num_ranks):
        _, linears = whole.of_rank(rank, num_ranks).with_adapters(2, 8, as_program=True)
        assert len(linears) == 2 * 4
        for linear in linears:
            a, b = linear.matrices(changes)
            parts = [
                expected.get(name, np.zeros(shape)).astype(np.float32)
                for name, shape in zip(linear.modules, linear.weight.stored_shapes, strict=True)
            ]
            np.testing.assert_allclose(b @ a, assemble_weight(linear.weight, parts), atol=1e-6)
            assert len(a) == 3 * sum(name in changes for name in linear.modules)


def test_panels_hold_sixteen_rows_and_zeros_beyond_the_rank() -> None:
    a = np.arange(18 * 3, dtype=np.float32).reshape(18, 3)
    result = panels(a)
    assert result.shape == (2, 3, 16)
    np.testing.assert_array_equal(result[1, :, 1], a[17])
    assert not result[1, :, 2:].any()


def test_each_operation_but_the_head_has_slots_and_keeps_its_consumers() -> None:
    spec, linears = tiny_spec().with_adapters(3, 16, as_program=True)
    kinds = [each.kind for each in spec.network.operations]
    assert kinds.count("lora") == kinds.count("linear") == len(linears)
    assert spec.network.num_adapter_slots == 3
    assert linears[0].a.shape == (3, 3, 64, 16)
    assert linears[0].b.shape == (3, 48, 128)
    assert tiny_spec().network.num_adapter_slots == 0


def test_experts_and_routers_are_known_by_name() -> None:
    assert not experts_modules(tiny_spec().network)
    network = ModelSpec.from_hugging_face(config_of("qwen3, experts")).network
    assert {"model.layers.0.mlp.gate", "model.layers.1.mlp.experts.4.down_proj"} < set(experts_modules(network))
