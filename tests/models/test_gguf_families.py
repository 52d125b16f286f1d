"""Every architecture of GGUF files: the model of the equivalent Hugging Face folder."""

import json
import re

import numpy as np
import pytest
from llm_serving.errors import ModelError
from llm_serving.formats.gguf import read_gguf
from llm_serving.formats.gguf_names import NAMINGS
from llm_serving.formats.stored_tensor import to_float32
from llm_serving.models.gguf_architectures import ARCHITECTURES
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weight_reader import WeightReader, check_folder
from support.family_configs import config_of
from support.gguf_families import family_facts, family_tensors, write_family
from support.gguf_files import gguf_bytes, number, plain, random_matrix
from support.graph_model import GraphModel, backend
from support.model_factories import write_safetensors

_SCALE = {"query_pre_attn_scalar": 32}
CASES = {
    "llama": ("llama", "llama", {}),
    "llama, biases, tied": ("llama", "llama, biases, tied", {}),
    "llama, odd heads": ("llama", "llama, odd heads and odd inner", {}),
    "mixtral": ("llama", "mixtral", {}),
    "internlm3": ("llama", "internlm3", {}),
    "qwen2": ("qwen2", "qwen2", {"use_sliding_window": False}),
    "qwen2moe": ("qwen2moe", "qwen2, experts", {"norm_topk_prob": False, "moe_intermediate_size": 64}),
    "qwen3": ("qwen3", "qwen3", {"tie_word_embeddings": True}),
    "qwen3moe": ("qwen3moe", "qwen3, experts", {"moe_intermediate_size": 64}),
    "gemma": ("gemma", "gemma", {}),
    "gemma2": ("gemma2", "gemma2", _SCALE),
    "gemma3": ("gemma3", "gemma3", _SCALE),
    "phi3": ("phi3", "phi3", {}),
    "phi3, no window": ("phi3", "phi3", {"sliding_window": None, "partial_rotary_factor": 1.0}),
    "internlm2": ("internlm2", "internlm2", {"bias": False}),
    "baichuan, 7B": ("baichuan", "baichuan2, 7B", {}),
    "baichuan, 13B": (
        "baichuan",
        "baichuan2, 13B",
        {"num_hidden_layers": 40, "model_max_length": 256, "hidden_size": 32, "num_attention_heads": 2, "head_dim": 16},
    ),
    "chatglm": ("chatglm", "glm", {}),
    "glm4": ("glm4", "glm4", {}),
    "granite": ("granite", "granite", {}),
    "smollm3": ("smollm3", "smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 4}),
    "seed_oss": (
        "seed_oss",
        "llama",
        {"architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_out_bias": False},
    ),
    "olmo2": ("olmo2", "llama", {"architectures": ["Olmo2ForCausalLM"]}),
    "olmo3": (
        "olmo2",
        "llama",
        {
            "architectures": ["Olmo3ForCausalLM"],
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "lfm2": ("lfm2", "lfm2", {"norm_eps": 1e-5, "conv_L_cache": 3, "head_dim": 32, "tie_word_embeddings": True}),
    "lfm2moe": (
        "lfm2moe",
        "lfm2",
        {
            "architectures": ["Lfm2MoeForCausalLM"],
            "norm_eps": 1e-5,
            "conv_L_cache": 4,
            "head_dim": 32,
            "tie_word_embeddings": True,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "num_dense_layers": 1,
        },
    ),
    "exaone4": ("exaone4", "llama", {"architectures": ["Exaone4ForCausalLM"], "sliding_window": None}),
    "exaone4, windows": (
        "exaone4",
        "llama",
        {
            "architectures": ["Exaone4ForCausalLM"],
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral3": (
        "mistral3",
        "llama",
        {
            "architectures": ["Ministral3ForCausalLM"],
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "granitemoe": (
        "granitemoe",
        "granite",
        {
            "architectures": ["GraniteMoeForCausalLM"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "separate_experts": True,
        },
    ),
    "minimax-m2": (
        "minimax-m2",
        "llama",
        {
            "architectures": ["MiniMaxM2ForCausalLM"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rotary_dim": 8,
        },
    ),
    "ernie4_5-moe": (
        "ernie4_5-moe",
        "llama",
        {
            "architectures": ["Ernie4_5_MoeForCausalLM"],
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
        },
    ),
    "hunyuan-moe": (
        "hunyuan-moe",
        "llama",
        {"architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": 4, "moe_topk": 2},
    ),
    "gpt-oss": (
        "gpt-oss",
        "llama",
        {
            "architectures": ["GptOssForCausalLM"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "attention_bias": True,
            "separate_experts": True,
        },
    ),
    "glm4moe": (
        "glm4moe",
        "llama",
        {
            "architectures": ["Glm4MoeForCausalLM"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 64,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
        },
    ),
    "ernie4_5": ("ernie4_5", "llama", {"architectures": ["Ernie4_5ForCausalLM"], "tie_word_embeddings": True}),
    "hunyuan": ("hunyuan-dense", "llama", {"architectures": ["HunYuanDenseV1ForCausalLM"]}),
    "cohere": ("command-r", "llama", {"architectures": ["CohereForCausalLM"], "logit_scale": 0.5}),
    "cohere2": (
        "cohere2",
        "llama",
        {"architectures": ["Cohere2ForCausalLM"], "sliding_window": 7, "num_hidden_layers": 4, "logit_scale": 0.5},
    ),
    "stablelm": (
        "stablelm",
        "llama",
        {
            "architectures": ["StableLmForCausalLM"],
            "use_qkv_bias": True,
            "partial_rotary_factor": 0.25,
            "use_parallel_residual": True,
        },
    ),
    "starcoder2": ("starcoder2", "llama", {"architectures": ["Starcoder2ForCausalLM"], "use_bias": True}),
    "deepseek3": (
        "deepseek2",
        "deepseek2",
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": True,
            "moe_intermediate_size": 64,
            "routed_scaling_factor": 2.5,
        },
    ),
    "deepseek2": ("deepseek2", "deepseek2", {"moe_intermediate_size": 64}),
    "deepseek2, groups": (
        "deepseek2",
        "deepseek2",
        {
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
}
"""(architecture, name in `family_configs.CONFIGS`, changes) by name."""


def case(name):
    architecture, known, changes = CASES[name]
    config = {**config_of(known), "vocab_size": 96, **changes}
    if name.startswith("baichuan, 13B"):
        config["num_key_value_heads"] = 2
    return architecture, config


def written_folder(folder, config, values):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", values)
    return folder


def logits(model):
    return GraphModel(check_folder(model), model, backend("cpu", "float32")).logits((list(range(3, 23)), 0, [4, 9, 2]))


def test_every_architecture_is_named_and_tested():
    assert ARCHITECTURES.keys() == NAMINGS.keys() == {architecture for architecture, _, _ in CASES.values()}


@pytest.mark.parametrize("kind", [0, 8], ids=["F32", "Q8_0"])
@pytest.mark.parametrize("name", CASES)
def test_gguf_file_has_the_weights_of_the_folder(tmp_path, name, kind):
    architecture, config = case(name)
    values = write_family(tmp_path / "a.gguf", architecture, config, kind)
    spec, expected = check_folder(tmp_path / "a.gguf"), ModelSpec.from_hugging_face(config)
    assert spec.max_position_embeddings == 256
    if architecture in ("internlm2", "baichuan"):
        return  # the tensors of the folder are stacked
    assert (spec.architecture, spec.tensors) == (expected.architecture, expected.tensors)
    reader = WeightReader(tmp_path / "a.gguf", spec.scheme)
    for tensor, shape in spec.tensors.items():
        np.testing.assert_allclose(to_float32(reader.read(tensor, shape)), values[tensor], rtol=1e-6, err_msg=tensor)
    reader.check_all_read()


def test_a_file_of_the_larger_baichuan_may_lack_its_context_length(tmp_path):
    architecture, config = case("baichuan, 13B")
    write_family(tmp_path / "a.gguf", architecture, config, 0)
    content = (tmp_path / "a.gguf").read_bytes()
    (tmp_path / "a.gguf").write_bytes(content.replace(b"baichuan.context_length", b"baichuan.another_length"))
    assert check_folder(tmp_path / "a.gguf").max_position_embeddings == 2**20


@pytest.mark.parametrize("name", ["mixtral", "qwen3moe", "phi3", "gemma3", "chatglm", "granite"])
def test_gguf_weights_in_blocks_of_256(tmp_path, name):
    architecture, config = case(name)
    config |= {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 1}
    config |= {key: 2 for key in ("num_experts", "num_local_experts") if key in config}
    values = write_family(tmp_path / "a.gguf", architecture, config, 12)
    spec = check_folder(tmp_path / "a.gguf")
    assert "Q4_K" in spec.scheme.stored_types
    reader = WeightReader(tmp_path / "a.gguf", spec.scheme)
    for tensor, shape in spec.tensors.items():
        found = to_float32(reader.read(tensor, shape))
        np.testing.assert_allclose(found, values[tensor], rtol=1e-6, atol=1e-6, err_msg=tensor)


@pytest.mark.mindspore
@pytest.mark.parametrize("name", CASES)
def test_gguf_file_gives_the_logits_of_the_folder(tmp_path, name):
    architecture, config = case(name)
    values = write_family(tmp_path / "a.gguf", architecture, config, 0)
    found = logits(tmp_path / "a.gguf")
    assert np.array_equal(found, logits(written_folder(tmp_path / "folder", config, values)))
    assert np.isfinite(found).all()
    assert np.std(found) > 0.01


@pytest.mark.parametrize(
    ("name", "stacked", "parts"),
    [
        ("qwen3moe", "ffn_up_exps", r"mlp\.experts\.\d\.up_proj"),
        ("mixtral", "ffn_up_exps", r"block_sparse_moe\.experts\.\d\.w3"),
        ("chatglm", "attn_qkv", r"self_attn\.[qkv]_proj"),
    ],
)
def test_gguf_parts_of_a_tensor_keep_the_bytes_of_their_blocks(tmp_path, name, stacked, parts):
    """Experts and stacked projections are consecutive rows of the file; reordered rows state their order."""
    architecture, config = case(name)
    write_family(tmp_path / "a.gguf", architecture, config, 8)
    whole = read_gguf(tmp_path / "a.gguf").tensors
    spec = check_folder(tmp_path / "a.gguf")
    weights = spec.scheme.weights(whole)
    found = [each for known, each in weights.items() if re.fullmatch(rf"model\.layers\.0\.{parts}\.weight", known)]
    rows = np.concatenate([each.stored["blocks"].read() for each in found])
    assert np.array_equal(rows, whole[f"blk.0.{stacked}.weight"].stored["blocks"].read())
    q = weights["model.layers.0.self_attn.q_proj.weight"]
    assert (q.order is not None) == (architecture == "llama")
    assert q.unpack.block.name == "Q8_0"


@pytest.mark.parametrize("name", ["llama, biases, tied", "granite", "qwen2moe", "glm4"])
def test_gguf_projections_may_be_stacked(tmp_path, name):
    """As with the option --fuse-qkv of llama.cpp's converter."""
    architecture, config = case(name)
    values = write_family(tmp_path / "a.gguf", architecture, config, 0)
    tensors = family_tensors(architecture, config, values)
    for layer in range(3):
        for kind in ("weight", "bias"):
            found = [tensors.pop(f"blk.{layer}.{part}.{kind}", None) for part in ("attn_q", "attn_k", "attn_v")]
            if found[0] is not None:
                tensors[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(found)
    stored = {known: plain(array) for known, array in tensors.items()}
    (tmp_path / "b.gguf").write_bytes(gguf_bytes(family_facts(architecture, config), stored))
    spec = check_folder(tmp_path / "b.gguf")
    assert spec.tensors == ModelSpec.from_hugging_face(config).tensors
    reader = WeightReader(tmp_path / "b.gguf", spec.scheme)
    for known, shape in spec.tensors.items():
        assert np.array_equal(reader.read(known, shape), values[known]), known


def test_gguf_experts_of_older_files(tmp_path):
    """Until 2024 each expert had its own tensors."""
    architecture, config = case("mixtral")
    values = write_family(tmp_path / "a.gguf", architecture, config, 0)
    stored = {}
    for known, array in family_tensors(architecture, config, values).items():
        if "_exps." in known:
            stored |= {known.replace("_exps.", f".{number}."): plain(part) for number, part in enumerate(array)}
        else:
            stored[known] = plain(array)
    (tmp_path / "b.gguf").write_bytes(gguf_bytes(family_facts(architecture, config), stored))
    spec = check_folder(tmp_path / "b.gguf")
    reader = WeightReader(tmp_path / "b.gguf", spec.scheme)
    for known, shape in spec.tensors.items():
        assert np.array_equal(reader.read(known, shape), values[known]), known


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
    with pytest.raises(ModelError, match=r"rope_factors_long\.weight must be a list of float32"):
        check_folder(tmp_path / "a.gguf")


def test_gguf_layers_that_predict_further_tokens(tmp_path):
    """GLM-4.5: the number of layers includes them, and their tensors are not used."""
    architecture, config = case("glm4moe")
    values = write_family(tmp_path / "a.gguf", architecture, config, 0)
    row = plain(np.ones(64, np.float32))
    more = {f"blk.3.{name}.weight": row for name in ("nextn.eh_proj", "nextn.enorm", "attn_norm", "ffn_gate_inp")}
    facts = {"glm4moe.nextn_predict_layers": 1, "glm4moe.block_count": 4}
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
    """Cosines and sines are not scaled; scores are, by the multiplier."""
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
    """Until 2025 keys and values were one tensor, and the sizes of heads the usual ones."""
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
        ("qwen2", {"qwen2.expert_count": 4}, "`qwen2.expert_count` must be 0: this architecture has no experts here"),
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
        ("qwen3moe", {"qwen3moe.block_count": number("<f", np.inf)}, "`num_hidden_layers` must be an integer"),
        ("qwen3moe", {"qwen3moe.expert_used_count": number("<f", np.inf)}, "`num_experts_per_tok` must be an integer"),
        ("glm4", {"glm4.rope.dimension_count": 40}, "`glm4.rope.dimension_count` must be the 32 elements of a head"),
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
    assert (spec.architecture, spec.window) == ("MistralForCausalLM", 7)


@pytest.mark.parametrize("layers", [46, 62])
def test_gguf_largest_gemma_scales_scores_by_hidden_size(tmp_path, layers):
    architecture = {46: "gemma2", 62: "gemma3"}[layers]
    _, config = case(architecture)
    write_family(tmp_path / "a.gguf", architecture, {**config, "num_hidden_layers": layers}, 0)
    assert ModelSpec.from_folder(tmp_path / "a.gguf").fact("query_pre_attn_scalar") == 64 // 4
