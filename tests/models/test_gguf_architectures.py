"""What single architectures of GGUF files state, and what is refused."""

import numpy as np
import pytest
from llm_serving.core.window import LayerWindow
from llm_serving.errors import ModelError
from llm_serving.formats.gguf import read_gguf
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weight_reader import WeightReader, check_folder
from support.gguf_cases import case, logits, written_folder
from support.gguf_families import family_facts, family_tensors, write_family
from support.gguf_files import gguf_bytes, number, plain, random_matrix


def test_gguf_longrope_of_phi3(tmp_path):
    lists = {"short_factor": np.linspace(1, 2, 8).tolist(), "long_factor": np.linspace(2, 9, 8).tolist()}
    scaling = {"rope_type": "longrope", **lists, "original_max_position_embeddings": 64}
    config = {**case("phi3")[1], "rope_scaling": scaling}
    factors = {
        f"rope_factors_{kind}.weight": plain(np.array(lists[f"{kind}_factor"], np.float32))
        for kind in ("short", "long")
    }
    (expected,) = ModelSpec.from_hugging_face(config).network.rotaries
    factor = float(np.sqrt(1 + np.log(256 / 64) / np.log(64)))
    facts = {"phi3.rope.scaling.original_context_length": 64, "phi3.rope.scaling.attn_factor": factor}
    for kind in ({}, {"phi3.rope.scaling.type": "longrope"}):
        write_family(tmp_path / "a.gguf", "phi3", config, 0, {**facts, **kind}, factors)
        (rotary,) = check_folder(tmp_path / "a.gguf").network.rotaries
        for length in (32, 256):
            np.testing.assert_allclose(rotary.cos(length), expected.cos(length), atol=1e-5)
    del factors["rope_factors_long.weight"]
    write_family(tmp_path / "a.gguf", "phi3", config, 0, facts, factors)
    with pytest.raises(ModelError, match=r"rope_factors_long\.weight must be a vector"):
        check_folder(tmp_path / "a.gguf")


@pytest.mark.mindspore
@pytest.mark.parametrize("name", ["glm4moe", "deepseek3"])
def test_gguf_layers_that_predict_further_tokens(tmp_path, name):
    """In GLM-4.5 and GLM-4.7-Flash the number of layers includes these layers, whose tensors are not read."""
    architecture, config = case(name)
    values = write_family(tmp_path / "a.gguf", architecture, config, 0)
    row = plain(np.ones(64, np.float32))
    more = {f"blk.3.{name}.weight": row for name in ("nextn.eh_proj", "nextn.enorm", "attn_norm", "ffn_gate_inp")}
    facts = {f"{architecture}.nextn_predict_layers": 1, f"{architecture}.block_count": 4}
    write_family(tmp_path / "b.gguf", architecture, config, 0, facts, more)
    assert np.array_equal(logits(tmp_path / "b.gguf"), logits(tmp_path / "a.gguf"))
    assert values.keys() == check_folder(tmp_path / "b.gguf").tensors.keys()


@pytest.mark.mindspore
def test_gguf_experts_of_granite_equal_stacked_ones(tmp_path):
    architecture, config = case("granitemoe")
    values = write_family(tmp_path / "a.gguf", architecture, config, 0)
    folder = {name: each for name, each in values.items() if ".experts." not in name}
    for layer in range(3):
        at = f"model.layers.{layer}.block_sparse_moe."
        gate, up, down = (
            np.stack([values[f"{at}experts.{number}.{part}_proj.weight"] for number in range(4)])
            for part in ("gate", "up", "down")
        )
        folder[f"{at}input_linear.weight"] = np.concatenate([gate, up], axis=1)
        folder[f"{at}output_linear.weight"] = down
    stacked = written_folder(tmp_path / "folder", {**config, "separate_experts": False}, folder)
    assert np.array_equal(logits(tmp_path / "a.gguf"), logits(stacked))


@pytest.mark.mindspore
def test_gguf_experts_of_gpt_oss_equal_stacked_ones(tmp_path):
    architecture, config = case("gpt-oss")
    values = write_family(tmp_path / "a.gguf", architecture, config, 0)
    folder = {name: each for name, each in values.items() if ".experts." not in name}
    for layer in range(3):
        at = f"model.layers.{layer}.mlp.experts."
        for kind, ending in (("weight", ""), ("bias", "_bias")):
            gate, up, down = (
                np.stack([values[f"{at}{number}.{part}_proj.{kind}"] for number in range(4)])
                for part in ("gate", "up", "down")
            )
            both = np.stack([gate, up], axis=2).reshape(4, -1, *gate.shape[2:])
            for part, array in (("gate_up", both), ("down", down)):
                turned = array.swapaxes(1, 2) if kind == "weight" else array
                folder[f"{at}{part}_proj{ending}"] = np.ascontiguousarray(turned)
    stacked = written_folder(tmp_path / "folder", {**config, "separate_experts": False}, folder)
    assert np.array_equal(logits(tmp_path / "a.gguf"), logits(stacked))


def test_gguf_yarn_of_gpt_oss_is_not_truncated(tmp_path):
    architecture, config = case("gpt-oss")
    facts = {"type": "yarn", "factor": 32.0, "original_context_length": 64}
    facts = {f"gpt-oss.rope.scaling.{key}": value for key, value in facts.items()}
    write_family(tmp_path / "a.gguf", architecture, config, 0, facts)
    (rotary,) = check_folder(tmp_path / "a.gguf").network.rotaries
    assert not rotary.scaling.truncate


def test_gguf_biases_of_experts_must_not_be_in_blocks(tmp_path):
    architecture, config = case("gpt-oss")
    bias = random_matrix(8, (4, config["intermediate_size"]), np.random.default_rng(0))[0]
    write_family(tmp_path / "a.gguf", architecture, config, 0, None, {"blk.0.ffn_up_exps.bias": bias})
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up_exps\.bias must not be block-quantized"):
        check_folder(tmp_path / "a.gguf")


def test_gguf_window_of_older_exaone4_files(tmp_path):
    architecture, config = case("exaone4")
    config |= {"num_hidden_layers": 64, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config |= {"head_dim": 16, "sliding_window": 4096}
    write_family(tmp_path / "a.gguf", architecture, config, 0, {"exaone4.attention.sliding_window": 0})
    facts = {key: value for key, value in family_facts(architecture, config).items() if "window" not in key}
    stored = read_gguf(tmp_path / "a.gguf").tensors
    (tmp_path / "b.gguf").write_bytes(gguf_bytes(facts, {name: plain(each.read()) for name, each in stored.items()}))
    network = check_folder(tmp_path / "b.gguf").network
    windows = [each.attributes["window"] for each in network.operations if each.kind == "attention"]
    assert windows == [4096, 4096, 4096, 0] * 16


def scale_of(network):
    (scale,) = {each.attributes["scale"] for each in network.operations if each.kind == "attention"}
    return scale


@pytest.mark.parametrize("multiplier", [0.0707, None])
def test_gguf_yarn_of_deepseek(tmp_path, multiplier):
    """The multiplier scales the attention scores, not the cosines and sines."""
    mscale = {"mscale": 0.707, "mscale_all_dim": 0.707} if multiplier else {"attention_factor": 1.0}
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, **mscale}
    config = {**case("deepseek2")[1], "rope_scaling": scaling}
    more = {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_beta_fast": 16.0}
    more |= {"yarn_log_multiplier": multiplier} if multiplier else {}
    facts = {f"deepseek2.rope.scaling.{key}": value for key, value in more.items()}
    write_family(tmp_path / "a.gguf", "deepseek2", config, 0, facts)
    found, expected = (
        each.network for each in (check_folder(tmp_path / "a.gguf"), ModelSpec.from_hugging_face(config))
    )
    assert found.rotaries == expected.rotaries
    scales = [
        [each.attributes["scale"] for each in net.operations if each.kind == "attention"] for net in (found, expected)
    ]
    assert scales[0] == pytest.approx(scales[1])


def test_gguf_latent_weights_of_older_files(tmp_path):
    """Older files (until 2025) store keys and values in one tensor, and lack the keys for MLA head sizes."""
    _, config = case("deepseek2")
    values = write_family(tmp_path / "a.gguf", "deepseek2", config, 0)
    facts = {key: value for key, value in family_facts("deepseek2", config).items() if not key.endswith("_mla")}
    facts |= {"deepseek2.attention.key_length": 32, "deepseek2.attention.value_length": 16}
    tensors = {name: plain(array) for name, array in family_tensors("deepseek2", config, values).items()}
    for layer in range(3):
        for part in ("attn_k_b", "attn_v_b"):
            del tensors[f"blk.{layer}.{part}.weight"]
        tensors[f"blk.{layer}.attn_kv_b.weight"] = plain(values[f"model.layers.{layer}.self_attn.kv_b_proj.weight"])
    (tmp_path / "b.gguf").write_bytes(gguf_bytes(facts, tensors))
    spec = check_folder(tmp_path / "b.gguf")
    reader = WeightReader(tmp_path / "b.gguf", spec.scheme)
    for name, shape in spec.tensors.items():
        assert np.array_equal(reader.read(name, shape), values[name])


@pytest.mark.parametrize(
    ("name", "facts", "message"),
    [
        ("qwen2", {"qwen2.expert_count": 4}, "`qwen2.expert_count` must be 0: this architecture has no experts"),
        ("lfm2", {"lfm2.attention.head_count_kv": [0, 0, 0]}, "`num_key_value_heads` must be an integer >= 1"),
        ("lfm2", {"lfm2.attention.head_count_kv": [0, 2]}, "`layer_types` must be a list of 3"),
        ("lfm2", {"lfm2.attention.head_count_kv": [0.5, 2.0]}, "must be at most 1024 integers >= 0"),
        ("qwen2", {"qwen2.attention.head_count_kv": [2, 2]}, "must be one value and no list"),
        ("minimax-m2", {"minimax-m2.expert_gating_func": 1}, "`minimax-m2.expert_gating_func` must be 2 .sigmoid."),
        ("hunyuan-moe", {"hunyuan-moe.expert_feed_forward_length": 8}, "must be the feed_forward_length"),
        ("glm4moe", {"glm4moe.nextn_predict_layers": 3}, "`num_hidden_layers` must be an integer >= 1"),
        ("glm4moe", {"glm4moe.expert_gating_func": number("<f", np.inf)}, "must be 2 .sigmoid."),
        ("deepseek2", {"deepseek2.expert_gating_func": 3}, "`deepseek2.expert_gating_func` must be 1 .softmax. or 2"),
        ("deepseek2", {"deepseek2.expert_weights_norm": True}, "`norm_topk_prob` must be false"),
        ("granite", {"granite.attention.key_length": 0}, "`granite.attention.key_length` must be an integer >= 1"),
        ("qwen3moe", {"qwen3moe.block_count": number("<f", np.inf)}, "`qwen3moe.block_count` must be an integer"),
        ("qwen3moe", {"qwen3moe.expert_used_count": number("<f", np.inf)}, "`num_experts_per_tok` must be an integer"),
        ("glm4", {"glm4.rope.dimension_count": 40}, "`glm4.rope.dimension_count` must be 32, the size of a head"),
        ("qwen3", {"qwen3.rope.scaling.yarn_attn_factor": 2.0, "qwen3.rope.scaling.type": "yarn"}, "must be 1"),
    ],
)
def test_gguf_architecture_refuses_what_its_family_lacks(tmp_path, name, facts, message):
    architecture, config = case(name)
    write_family(tmp_path / "a.gguf", architecture, config, 0, facts)
    with pytest.raises(ModelError, match=message):
        check_folder(tmp_path / "a.gguf")


def test_gguf_window_of_a_llama_file(tmp_path):
    _, config = case("llama")
    write_family(tmp_path / "a.gguf", "llama", config, 0, {"llama.attention.sliding_window": 7})
    spec = check_folder(tmp_path / "a.gguf")
    assert (spec.architecture, spec.layout.windows) == ("MistralForCausalLM", (LayerWindow(7),))


@pytest.mark.parametrize("layers", [46, 62])
def test_gguf_largest_gemma_scales_scores_by_hidden_size(tmp_path, layers):
    architecture = {46: "gemma2", 62: "gemma3"}[layers]
    _, config = case(architecture)
    write_family(tmp_path / "a.gguf", architecture, {**config, "num_hidden_layers": layers}, 0)
    assert ModelSpec.from_folder(tmp_path / "a.gguf").config_value("query_pre_attn_scalar") == 64 // 4


@pytest.mark.parametrize(
    ("architecture", "given", "key", "rule"),
    [
        ("llama4", {"block_count": 2**31 - 1}, "block_count", "must be at most 1024"),
        ("llama4", {"block_count": 2.5}, "block_count", "must be an integer >= 1"),
        ("granitehybrid", {"block_count": 0}, "block_count", "must be an integer >= 1"),
        ("gemma4", {"block_count": [2, 2]}, "block_count", "must be one value and no list"),
        ("lfm2", {"embedding_length": [32, 32]}, "embedding_length", "must be one value and no list"),
        ("nemotron_h", {"attention.head_count": [2, 2]}, "attention.head_count", "must be one value and no list"),
    ],
)
def test_gguf_sizes_must_be_single_integers(tmp_path, architecture, given, key, rule):
    sizes = {"block_count": 2, "embedding_length": 32, "attention.head_count": 2, "feed_forward_length": 64, **given}
    metadata = {
        "general.architecture": architecture,
        **{f"{architecture}.{name}": each for name, each in sizes.items()},
    }
    (tmp_path / "a.gguf").write_bytes(
        gguf_bytes(metadata, {"token_embd.weight": plain(np.zeros((64, 32), np.float32))})
    )
    with pytest.raises(ModelError) as error:
        ModelSpec.from_folder(tmp_path / "a.gguf")
    assert f"`{architecture}.{key}` {rule}" in str(error.value)
