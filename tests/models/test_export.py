"""The graphs out of Ascend's primitives: what a device reads in them, and that they run as they were exported."""

import pytest
from families.exported import ROWS, differences, export_all, networks_of
from llm_serving.lowering.step import STEP_INPUTS

pytestmark = pytest.mark.mindspore

ATTENTION = {"states": "PagedAttention", "of_prompts": "FlashAttentionScore"}
LENGTHS = {"PagedAttention": {4: "batch_valid_length", 8: "q_seq_lens"}}
"""Input of an attention -> the length it is. Ascend's kernels look lengths up by these names of parameters as well."""

MASK = {"PagedAttention": 7, "FlashAttentionScore": 6}
"""Input that is the mask; the one before it is absent."""


@pytest.fixture(scope="module", params=[("qwen3", "bfloat16")], ids="-".join)
def exported(request, tmp_path_factory):
    """(spec, networks, folder, graph -> what was written)"""
    folder = tmp_path_factory.mktemp("model")
    spec, networks = networks_of(request.param[0], folder, request.param[1])
    return spec, networks, folder, export_all(spec, networks, folder)


def kind(node):
    return node.op_type.split(":")[2] if node.op_type.startswith("REF") else node.op_type


@pytest.mark.parametrize("graph", ROWS)
def test_the_graph_is_made_of_what_a_device_has_and_knows_lengths_by_name(exported, graph):
    written = exported[3][graph].graph
    assert [each.name.split(":")[-1] for each in written.input] == [name for name, _ in STEP_INPUTS]
    nodes = {node.output[0]: node for node in written.node if node.output}
    found = {kind(node) for node in nodes.values()}
    assert {"ReshapeAndCache", "ApplyRotaryPosEmb", "AddRmsNorm", "Swiglu", ATTENTION[graph]} <= found
    assert not (set(ATTENTION.values()) - {ATTENTION[graph]}) & found
    of_attention = [node for node in nodes.values() if kind(node) == ATTENTION[graph]]
    assert len(of_attention) == len(exported[0].caches)
    for node in of_attention:
        for index, name in LENGTHS.get(kind(node), {}).items():
            moved = nodes[node.input[index]]
            assert (kind(moved), moved.input[0].split(":")[-1]) == ("MoveTo", name), "a length is not on the host"
    # One mask for all layers.
    (mask,) = {node.input[MASK[ATTENTION[graph]]] for node in of_attention}
    assert mask not in {node.input[MASK[ATTENTION[graph]] - 1] for node in of_attention}, "the mask is None"
    rotated = [node for node in nodes.values() if kind(node) == "ApplyRotaryPosEmb"]
    assert {node.input[4].split(":")[-1] for node in rotated} == {"batch_valid_length"}


def test_a_graph_that_is_read_again_gives_the_same_bits(exported):
    assert differences(*exported[:3]) == []
