"""The network out of Ascend's primitives exports on a machine without the device."""

import mindspore as ms
import pytest
from graph_model import backend
from llm_serving.models.base import dynamic_inputs
from llm_serving.models.llama_networks import llama
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "attention_bias": True}])
def test_both_graphs_of_one_network_export(tmp_path, dtype, changes):
    spec = tiny_spec(**changes)
    write_model(tmp_path, spec)
    ascend = backend("ascend", dtype)
    kv_tensors = KVTensors.allocate(spec, ascend, num_blocks=8, block_size=16)
    network = llama(spec, ascend, WeightReader(tmp_path), kv_tensors.layers, max_positions=128)
    network.set_train(False)
    assert export(network, tmp_path / "any_step.mindir") == {"PagedAttention"}
    network.use_whole_prompts(ascend)
    assert export(network, tmp_path / "whole_prompts.mindir", num_rows=8) == {"FlashAttentionScore"}
