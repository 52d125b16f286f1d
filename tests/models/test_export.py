"""Exported graphs of Ascend's primitives: their content for a device, and equal results after loading."""

from dataclasses import replace

import mindspore as ms
import numpy as np
import pytest
from families import models
from families.exported import NUM_BLOCKS, ROWS, differences, export, export_all, inputs_of, networks_of
from llm_serving.backends.ascend_cells import prompt_mask
from llm_serving.core.enums import QuantizationName
from llm_serving.lowering.lower import lower
from llm_serving.lowering.step_inputs import ADAPTER_INPUT, STEP_INPUTS, dynamic, dynamic_inputs
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weight_reader import WeightReader
from llm_serving.network.adapters import AdapterLimits
from llm_serving.network.quantization import Quantization
from llm_serving.worker.adapters import AdapterMemory
from llm_serving.worker.compiled_graph import CompiledNetwork
from llm_serving.worker.kv_cache import KVTensors
from llm_serving.worker.model_inputs import NO_TOKENS, ModelLimits, build_model_inputs
from mindspore import nn
from mindspore.train.mind_ir_pb2 import TensorProto
from support.adapter_factories import write_adapter
from support.graph_model import BLOCK_SIZE, backend
from support.step_factories import step_input

pytestmark = pytest.mark.mindspore

ATTENTION = {"states": "PagedAttention", "of_prompts": "FlashAttentionScore"}
LENGTHS = {"PagedAttention": {4: "batch_valid_length", 8: "q_seq_lens"}}
"""Attention input -> the length it contains. Ascend's kernels find lengths by these parameter names."""

MASK = {"PagedAttention": 7, "FlashAttentionScore": 6}
"""Index of the mask input; the input before it is absent."""

MODES = {"PagedAttention": {13: 0, 14: 0, 15: 0}, "FlashAttentionScore": {15: 0, 16: 5, 17: 0}}
"""Input -> its value: unquantized caches, the default mask mode, equal head widths of values and keys; high precision,
layout TH, the default mask mode.
"""

TWO_LAYERS = {"num_hidden_layers": 2}
"""Two layers of the same kind, which must share their common inputs."""


@pytest.fixture(scope="module", params=[("qwen3-moe", "bfloat16")], ids="-".join)
def exported(request, tmp_path_factory):
    """Return (spec, networks, folder, graph -> written nodes)."""
    folder = tmp_path_factory.mktemp("model")
    spec, networks = networks_of(request.param[0], folder, request.param[1], changes=TWO_LAYERS)
    return spec, networks, folder, export_all(spec, networks, folder)


def kind(node):
    return node.op_type.split(":")[2] if node.op_type.startswith("REF") else node.op_type


@pytest.mark.parametrize("graph", ROWS)
def test_exported_graph_has_device_operators_and_named_lengths(exported, graph):
    written = exported[3][graph].graph
    assert [each.name.split(":")[-1] for each in written.input] == [name for name, _ in STEP_INPUTS]
    nodes = {node.output[0]: node for node in written.node if node.output}
    found = {kind(node) for node in nodes.values()}
    assert {"ReshapeAndCache", "ApplyRotaryPosEmb", "AddRmsNorm", "SiLU", ATTENTION[graph]} <= found
    assert "Swiglu" not in found, "its kernel refuses a graph in which no fusion pass made it"
    assert {"MoeGatingTopKSoftmax", "MoeInitRoutingV2", "GroupedMatmulV4", "InnerMoeTokenUnpermute"} <= found
    assert not (set(ATTENTION.values()) - {ATTENTION[graph]}) & found
    of_attention = [node for node in nodes.values() if kind(node) == ATTENTION[graph]]
    assert len(of_attention) == len(exported[0].caches)
    for node in of_attention:
        for index, name in LENGTHS.get(kind(node), {}).items():
            assert node.input[index].split(":")[-1] == name
    # One mask for all layers.
    (mask,) = {node.input[MASK[ATTENTION[graph]]] for node in of_attention}
    assert mask not in {node.input[MASK[ATTENTION[graph]] - 1] for node in of_attention}, "the mask is None"
    rotated = [node for node in nodes.values() if kind(node) == "ApplyRotaryPosEmb"]
    assert {node.input[4].split(":")[-1] for node in rotated} == {"batch_valid_length"}


@pytest.mark.parametrize(("ascend", "kind_of_sum"), [("ascend", "AllGather"), ("ascend_fast", "AllReduce")])
def test_exported_rank_graphs_all_reduce_partial_sums(monkeypatch, tmp_path, ascend, kind_of_sum):
    monkeypatch.setenv("RANK_SIZE", "2")
    spec, networks = networks_of("qwen3", tmp_path, changes={"num_hidden_layers": 1}, num_ranks=2, ascend=ascend)
    written = export(networks.states, tmp_path / "states.mindir", dynamic_inputs()).graph
    head = export(networks.head, tmp_path / "head.mindir", inputs_of(spec, "head")).graph
    of_states, of_head = ([kind(node) for node in graph.node] for graph in (written, head))
    assert of_states.count(kind_of_sum) == 1 + 2 * len(spec.caches)
    assert of_head.count("AllReduce") == 1
    operations = ModelSpec.from_folder(tmp_path).network.operations
    whole = {
        each.weights[role].shape
        for each in operations
        for role in ("table", "weight")
        if role in each.weights and each.kind != "rms_norm"
    }
    shapes = {tuple(each.dims) for graph in (written, head) for each in graph.parameter}
    halves = {shape for rows, columns in whole for shape in ((rows // 2, columns), (rows, columns // 2))}
    assert shapes & halves
    assert not shapes & whole


def constants_of(written, operator):
    """Return input -> constant of each node of this operator."""
    nodes = {node.output[0]: node for node in written.node if node.output}
    constants = {name: node.attribute[0] for name, node in nodes.items() if kind(node) == "Constant"}
    for node in nodes.values():
        if kind(node) == operator:
            yield {index: constants[name] for index, name in enumerate(node.input) if name in constants}


@pytest.mark.parametrize("graph", ROWS)
def test_exported_masks_have_the_default_mode(exported, graph):
    found = list(constants_of(exported[3][graph].graph, ATTENTION[graph]))
    assert found
    for constants in found:
        for index, value in MODES[ATTENTION[graph]].items():
            assert constants[index].i == value, f"input {index} of {ATTENTION[graph]}"


def test_prompt_mask_is_causal(exported):
    for constants in constants_of(exported[3]["of_prompts"].graph, "FlashAttentionScore"):
        (mask,) = constants[MASK["FlashAttentionScore"]].tensors
        bits = np.frombuffer(mask.raw_data, np.uint16).astype(np.uint32) << 16
        assert (bits.view(np.float32).reshape(mask.dims) == np.triu(np.ones((128, 128)), 1)).all()


@pytest.mark.parametrize(("dtype", "hidden"), [("bfloat16", 1.0), ("float16", -10000.0)])
def test_prompt_mask_marks_hidden_positions_by_type(dtype, hidden):
    mask = prompt_mask(getattr(ms, dtype)).asnumpy().astype(np.float32)
    assert (mask == np.triu(np.full((128, 128), hidden), 1)).all()


def test_paged_attention_mask_subtracts_10000(exported):
    written = exported[3]["states"].graph
    nodes = {node.output[0]: node for node in written.node if node.output}
    (mask,) = {node.input[MASK["PagedAttention"]] for node in nodes.values() if kind(node) == "PagedAttention"}
    product = nodes[nodes[mask].input[0]]
    assert (kind(nodes[mask]), kind(product)) == ("Cast", "Mul")
    (taken_off,) = [nodes[each] for each in product.input if kind(nodes[each]) == "Constant"]
    assert np.frombuffer(taken_off.attribute[0].tensors[0].raw_data, np.float32) == [-10000.0]


@pytest.mark.parametrize("graph", ROWS)
def test_exported_cache_inputs_have_device_types(exported, graph):
    spec, _, _, written = exported
    for part, widths in (("key", "key_width"), ("value", "value_width")):
        found = [tuple(each.dims) for each in written[graph].graph.parameter if each.name.endswith(f".{part}_cache")]
        assert found == [(NUM_BLOCKS, BLOCK_SIZE, each.kv_heads, getattr(each, widths)) for each in spec.caches]
    types = {each.name.split(":")[-1]: each.tensor[0].data_type for each in written[graph].graph.input}
    assert set(types.values()) == {TensorProto.INT32}


def test_exported_graph_round_trip_is_bit_identical(exported):
    assert differences(*exported[:3]) == []


def test_exported_w8a8_graph_round_trip_is_bit_identical(tmp_path):
    kept = Quantization(QuantizationName.W8A8)
    spec, networks = networks_of("qwen3-moe", tmp_path, quantization=kept, changes={"num_hidden_layers": 1})
    written = export_all(spec, networks, tmp_path)
    for graph, (products, of_experts, routers) in {"states": (2, 2, 1), "head": (1, 0, 0)}.items():
        found = [kind(node) for node in written[graph].graph.node]
        assert found.count("DynamicQuantExt") == products + of_experts
        named = "QuantBatchMatmul", "GroupedMatmulV4", "MatMul"
        assert [found.count(each) for each in named] == [products, of_experts, routers]
        types = {each.name.rsplit(".", 1)[-1]: each.data_type for each in written[graph].graph.parameter}
        assert (types["codes"], types["scales"]) == (TensorProto.INT8, TensorProto.FLOAT)
    assert differences(spec, networks, tmp_path) == []


def test_exported_graph_with_slots_of_adapters_computes_the_bits_of_the_network(tmp_path):
    models.write("qwen3", tmp_path, changes={"num_hidden_layers": 1})
    base = ModelSpec.from_folder(tmp_path)
    write_adapter(tmp_path / "adapter", base, rank=3)
    limits, chosen = AdapterLimits(2, 16), backend("ascend", "bfloat16")
    spec, linears = base.with_adapters(*limits, as_program=False)
    caches = KVTensors.allocate(spec, chosen, NUM_BLOCKS, BLOCK_SIZE).layers
    networks = lower(spec, chosen, WeightReader(tmp_path), caches, NUM_BLOCKS * BLOCK_SIZE, as_program=False)
    memory = AdapterMemory(linears, (), networks.parameters, "bfloat16", limits, as_program=False)
    memory.read(7, tmp_path / "adapter")
    slots = memory.slots_of_tokens(np.array([[7, 1], [0, -1]], np.int32), np.array([9, 4], np.int32))
    inputs = [*dynamic_inputs(), *dynamic([ADAPTER_INPUT])]
    written = export(networks.states, tmp_path / "states.mindir", inputs).graph
    assert [each.name.split(":")[-1] for each in written.input] == [name for name, _ in (*STEP_INPUTS, ADAPTER_INPUT)]
    shapes = [tuple(each.dims) for each in written.parameter]
    assert all(linear.a.shape in shapes and linear.b.shape in shapes for linear in linears)
    tokens = list(range(2, 15))
    given = step_input([(tokens[:9], 0, [3]), (tokens[9:], 0, [5])])
    arrays = build_model_inputs(given, NO_TOKENS, ModelLimits(spec.vocab_size, 256, NUM_BLOCKS, BLOCK_SIZE))
    again = CompiledNetwork(nn.GraphCell(ms.load(str(tmp_path / "states.mindir"))), inputs)
    network = CompiledNetwork(networks.states, inputs)
    plain = network(replace(arrays, adapter_slots=(np.full(13, -1, np.int32),)).arrays()).copy()
    adapted = [each(replace(arrays, adapter_slots=(slots,)).arrays()).copy() for each in (network, again)]
    np.testing.assert_array_equal(*adapted)
    assert (adapted[0][0] != plain[0]).any()
    np.testing.assert_array_equal(adapted[0][1], plain[1])
