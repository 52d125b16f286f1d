"""The network out of Ascend's primitives exports on a machine without the device."""

import mindspore as ms
import pytest
from graph_model import backend
from llm_serving.lowering.cells import NetworkOfCells
from llm_serving.lowering.parameters import parameters_of
from llm_serving.lowering.step import dynamic_inputs
from llm_serving.models.weights import WeightReader
from llm_serving.worker.kv_tensors import KVTensors
from model_factories import tiny_spec, write_model

pytestmark = pytest.mark.mindspore


def export(network, path, num_rows=None):
    """Names of the primitives in the exported graph, as far as they are attention."""
    inputs = dynamic_inputs(num_rows)
    network.set_inputs(*inputs)
    ms.export(network, *inputs, file_name=str(path), file_format="MINDIR")
    content = path.read_bytes()
    assert b"ReshapeAndCache" in content
    return {name for name in ("PagedAttention", "FlashAttentionScore") if name.encode() in content}


@pytest.mark.parametrize(
    ("dtype", "changes"), [("bfloat16", {"tie_word_embeddings": True, "attention_bias": True}), ("float16", {})]
)
def test_both_graphs_of_one_network_export(tmp_path, dtype, changes):
    spec = tiny_spec(**changes)
    write_model(tmp_path, spec)
    ascend = backend("ascend", dtype)
    kv_tensors = KVTensors.allocate(spec, ascend, num_blocks=8, block_size=16)
    parameters = parameters_of(spec.network, ascend, WeightReader(tmp_path), 128, as_cells=True)
    for prompts, name in ((False, "PagedAttention"), (True, "FlashAttentionScore")):
        made = NetworkOfCells(spec.network, ascend, parameters, kv_tensors.layers, 128, whole_prompts=prompts)
        made.set_train(False)
        assert export(made, tmp_path / f"{name}.mindir", num_rows=8 if prompts else None) == {name}
