"""GGUF files of families that mix attention with other layers, of other families with layers of their own, and of
encoders: the folder's model."""

import numpy as np
import pytest
from families import deepseek, encoders, gemma4, models
from families.weights import weights_of
from llm_serving.core.enums import PoolingMode
from llm_serving.errors import ModelError
from llm_serving.formats.gguf import read_gguf
from llm_serving.formats.stored_tensor import to_float32
from llm_serving.models.pooling import resolve_pooling
from llm_serving.models.weight_reader import WeightReader, check_folder
from support.gguf_cases import written_folder
from support.gguf_hybrid_cases import CASES, case
from support.gguf_hybrids import write_gguf
from support.graph_model import GraphModel, backend

pytestmark = pytest.mark.mindspore

ENCODERS = {
    "bert": "bert",
    "xlm-roberta": "bert",
    "xlm-roberta-reranker": "bert",
    "modernbert": "modern-bert",
    "modernbert-reranker": "modern-bert",
}
"""Name in `encoders.models` -> architecture. The converter omits the pooler of BERT, which its classifier needs."""
IDS = list(range(3, 43))


def outputs(path):
    spec = check_folder(path)
    model = GraphModel(spec, path, backend("cpu", "float32"))
    if spec.network.causal:
        return model.logits((IDS, 0, [4, 9, 2]))
    states = model.states((IDS, 0, [4, 9, 2]))
    return model.head(states) if spec.network.num_labels else states


@pytest.mark.parametrize("name", CASES)
def test_gguf_file_of_a_hybrid_gives_the_logits_of_the_folder(tmp_path, name):
    architecture, config, weights = case(name)
    write_gguf(tmp_path / "a.gguf", architecture, config, weights)
    expected = outputs(written_folder(tmp_path / "folder", config, weights))
    np.testing.assert_allclose(outputs(tmp_path / "a.gguf"), expected, atol=1e-4)
    assert np.std(expected) > 0.1


@pytest.mark.parametrize("name", ENCODERS)
def test_gguf_file_of_an_encoder_gives_the_states_of_the_folder(tmp_path, name):
    encoders.write(name, tmp_path / "folder")
    config, weights = encoders.models()[name].config, encoders.weights(name)
    write_gguf(tmp_path / "a.gguf", ENCODERS[name], config, weights)
    expected = outputs(tmp_path / "folder")
    assert np.array_equal(outputs(tmp_path / "a.gguf"), expected)
    assert np.std(expected) > 0.1


@pytest.mark.parametrize(
    ("name", "number", "mode"),
    [
        ("bert", 1, PoolingMode.MEAN),
        ("xlm-roberta", 2, PoolingMode.FIRST),
        ("modernbert", 3, PoolingMode.LAST),
        ("bert", 0, PoolingMode.MEAN),
    ],
)
def test_gguf_file_of_an_encoder_states_its_pooling(tmp_path, name, number, mode):
    config, architecture = encoders.models()[name].config, ENCODERS[name]
    facts = {f"{architecture}.pooling_type": number}
    write_gguf(tmp_path / "a.gguf", architecture, config, encoders.weights(name), facts)
    pooling = resolve_pooling("auto", tmp_path / "a.gguf", check_folder(tmp_path / "a.gguf"))
    assert (pooling.mode, pooling.normalises, pooling.embedding_only) == (mode, number > 0, True)


def in_eighths(weights, endings):
    """Return the weights with values that blocks of Q8_0 store exactly."""
    rounded = {name: np.clip(np.rint(each * 64), -127, 127) / 64 for name, each in weights.items()}
    return {name: rounded[name].astype(np.float32) if endings in name else each for name, each in weights.items()}


@pytest.mark.parametrize("dim", [32, 16])
def test_gguf_columns_of_heads_keep_their_blocks(tmp_path, dim):
    """Blocks of 32 columns are reordered if each lies within one head; otherwise they are dequantized."""
    config = {**CASES["qwen35"].config, "linear_num_value_heads": 4, "linear_value_head_dim": dim}
    shapes = models.qwen_next._hybrid(config)
    weights = in_eighths(weights_of("blocks", shapes), "linear_attn.")
    blocks = ("attn_qkv", "attn_gate", "ssm_out", "ssm_beta")
    write_gguf(tmp_path / "a.gguf", "qwen35", config, weights, None, blocks)
    spec = check_folder(tmp_path / "a.gguf")
    reader = WeightReader(tmp_path / "a.gguf", spec.scheme)
    for part in ("in_proj_qkv", "in_proj_z", "in_proj_b", "out_proj", "in_proj_a"):
        name = f"model.layers.0.linear_attn.{part}.weight"
        assert np.array_equal(reader.read(name, weights[name].shape), weights[name]), part
    packed = reader.read_packed(name.replace("in_proj_a", "out_proj"), (64, 4 * dim))
    assert isinstance(packed, np.ndarray) == (dim < 32)


def test_gguf_file_with_grouped_projections_of_qwen3_next(tmp_path):
    """The file has the tensors that the converter wrote in 2025."""
    architecture, config, weights = case("qwen3next")
    write_gguf(tmp_path / "a.gguf", architecture, config, weights)
    older = {name: each for name, each in weights.items() if "in_proj_qkvz" not in name}
    older |= {
        f"blk.{name.split('.')[2]}.ssm_in.weight": each for name, each in weights.items() if "in_proj_qkvz" in name
    }
    write_gguf(tmp_path / "b.gguf", architecture, config, older)
    assert "blk.0.ssm_in.weight" in read_gguf(tmp_path / "b.gguf").tensors
    assert np.array_equal(outputs(tmp_path / "b.gguf"), outputs(tmp_path / "a.gguf"))


def test_gguf_file_of_qwen35_with_a_layer_that_predicts_further_tokens(tmp_path):
    architecture, config, weights = case("qwen35")
    write_gguf(tmp_path / "a.gguf", architecture, config, weights)
    row = np.ones((64, 64), np.float32)
    more = {f"blk.4.{name}.weight": row for name in ("nextn.eh_proj", "attn_q")}
    facts = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    write_gguf(tmp_path / "b.gguf", architecture, config, {**weights, **more}, facts)
    assert np.array_equal(outputs(tmp_path / "b.gguf"), outputs(tmp_path / "a.gguf"))


def test_gguf_file_of_glm_5_2_may_lack_the_list_of_indexers(tmp_path):
    """Files with the long context of GLM-5.2 have indexers in the first three layers, then in every fourth."""
    config = {**deepseek.GLM_5, "indexer_types": ["full", "full", "full", "shared"], "num_hidden_layers": 4}
    del config["mlp_layer_types"]
    weights = weights_of("glm", deepseek._deepseek(config))
    config["indexer_types"] = None
    write_gguf(tmp_path / "a.gguf", "glm-dsa", config, weights, {"glm-dsa.context_length": 2**20})
    assert set(weights) >= set(check_folder(tmp_path / "a.gguf").tensors)
    write_gguf(tmp_path / "b.gguf", "glm-dsa", config, weights)
    with pytest.raises(ModelError, match=r"missing: 5: model\.layers\.3\.self_attn\.indexer\.wq_b\.weight"):
        check_folder(tmp_path / "b.gguf")


@pytest.mark.parametrize(
    ("name", "facts", "message"),
    [
        ("deepseek32", {"expert_gating_func": 1}, "`deepseek32.expert_gating_func` must be 2 .sigmoid."),
        ("glm-dsa", {"attention.indexer.types": [True, False]}, "`indexer_types` must be a list of 3"),
        ("granitehybrid", {"attention.head_count_kv": 2}, "must be a list with a number for each layer"),
        ("nemotron_h", {"feed_forward_length": [104, 0]}, "must be a list with a number for each layer"),
        ("nemotron_h", {"ssm.inner_size": 0}, "`nemotron_h.ssm.inner_size` must be an integer >= 1"),
        ("falcon-h1", {"ssm.group_count": 3}, "must be a multiple of its groups"),
        ("qwen35", {"ssm.time_step_rank": 3}, "must be a multiple of `ssm.group_count`"),
        ("qwen35", {"nextn_predict_layers": 4}, "`num_hidden_layers` must be an integer >= 1"),
    ],
)
def test_gguf_file_of_a_hybrid_with_other_sizes_is_refused(tmp_path, name, facts, message):
    architecture, config, weights = case(name)
    own = {f"{architecture}.{key}": value for key, value in facts.items()}
    write_gguf(tmp_path / "a.gguf", architecture, config, weights, own)
    with pytest.raises(ModelError, match=message):
        check_folder(tmp_path / "a.gguf")


def test_gguf_file_of_granite_without_the_width_of_its_experts_is_refused(tmp_path):
    architecture, config, weights = case("granitehybrid")
    path = tmp_path / "a.gguf"
    write_gguf(path, architecture, config, weights)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"granitehybrid.feed_forward_length", b"granitehybrid.feed_forward_other_"))
    with pytest.raises(ModelError, match="`intermediate_size` must be an integer >= 1"):
        check_folder(path)


def test_gguf_rates_must_be_negative(tmp_path):
    architecture, config, weights = case("falcon-h1")
    weights["model.layers.0.mamba.A_log"] = np.full(4, -np.inf, np.float32)
    write_gguf(tmp_path / "a.gguf", architecture, config, weights)
    with pytest.raises(ModelError, match=r"blk\.0\.ssm_a: all elements must be negative"):
        outputs(tmp_path / "a.gguf")


def test_gguf_file_of_a_bert_classifier_lacks_its_pooler(tmp_path):
    encoder = encoders.models()["bert-reranker"]
    weights = {
        name.replace("classifier.", "classifier.out_proj."): each
        for name, each in encoders.weights("bert-reranker").items()
    }
    write_gguf(tmp_path / "a.gguf", "bert", encoder.config, weights)
    with pytest.raises(ModelError, match=r"missing: 2: pooler\.dense\.weight"):
        check_folder(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("architecture", "model", "blocks"),
    [
        ("gemma4", gemma4._gemma4(gemma4.MOE | {"moe_intermediate_size": 32}), ("ffn_gate_up_exps", "ffn_down_exps")),
        ("gemma3n", gemma4._gemma3n({"hidden_size_per_layer_input": 32}), ("altup_proj", "per_layer_token_embd")),
    ],
)
def test_gguf_stacks_of_matrices_are_read_from_blocks(tmp_path, architecture, model, blocks):
    stacked = ("experts.", "altup_projections", "embed_tokens_per_layer")
    weights = weights_of("stacks", model)
    for name in stacked:
        weights = in_eighths(weights, name)
    write_gguf(tmp_path / "a.gguf", architecture, model.config, weights, None, blocks)
    spec = check_folder(tmp_path / "a.gguf")
    assert "Q8_0" in spec.scheme.stored_types
    reader = WeightReader(tmp_path / "a.gguf", spec.scheme)
    for name, shape in spec.tensors.items():
        if name in weights:  # experts are apart in a file
            np.testing.assert_array_equal(to_float32(reader.read(name, shape)), weights[name], err_msg=name)
    expected = outputs(written_folder(tmp_path / "folder", model.config, weights))
    error = np.abs(outputs(tmp_path / "a.gguf") - expected).mean()
    assert error < 0.1 * np.std(expected)  # products of blocks round their inputs to 8 bits
