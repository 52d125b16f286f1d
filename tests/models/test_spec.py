"""ModelSpec: values read from a config.json and from a MindFormers model_config, and refused ones."""

import json
import math

import numpy as np
import pytest
from families import models
from hypothesis import given
from hypothesis import strategies as st
from llm_serving.core.window import LayerWindow
from llm_serving.errors import ModelError
from llm_serving.models.spec import ModelSpec
from llm_serving.network.caches import CacheShape
from llm_serving.network.rope import ROPE_SCALINGS, Rotary, Scaling
from support.family_configs import CONFIGS, config_of

LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA_3_1B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA_3_ROPE,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "rope_scaling": None,
}


def rotary_of_model(spec):
    """Return the rotary embedding that all layers share."""
    (cos,) = {each.weights["cos"] for each in spec.network.operations if each.kind == "rope"}
    return cos.generate.__self__


def test_spec_reads_llama_3_with_grouped_queries_and_tied_embeddings():
    spec = ModelSpec.from_hugging_face(LLAMA_3_1B)
    assert (spec.architecture, spec.vocab_size) == ("LlamaForCausalLM", 128256)
    assert spec.caches == (CacheShape(8, 64, 64),) * 16
    assert (spec.max_position_embeddings, spec.bos_token_id) == (131072, 128000)
    assert spec.eos_token_ids == (128001, 128008, 128009)
    scaling = Scaling(kind="llama3", factor=32.0, low=1.0, high=4.0, original=8192)
    assert rotary_of_model(spec) == Rotary(64, 64, 500000.0, scaling=scaling, own=64)
    assert spec.num_parameters == 1_235_814_400
    assert spec.num_active_parameters == 16 * (2048 * (2048 + 2 * 512) + 2048 * 2048 + 3 * 2048 * 8192)
    assert spec.kv_bytes_per_token(2) == 32_768
    assert spec.kv_bytes_per_token(2, int8=True) == 16 * 2 * 8 * (64 + 4)


def test_spec_of_llama_2_derives_missing_heads_and_ids():
    spec = ModelSpec.from_hugging_face(LLAMA_2_7B)
    assert spec.caches == (CacheShape(32, 128, 128),) * 32
    assert (spec.eos_token_ids, spec.pad_token_id) == ((2,), None)
    assert rotary_of_model(spec) == Rotary(128, 128, 10000.0, own=128)
    assert "lm_head.weight" in spec.tensors
    assert spec.num_parameters == 6_738_415_616
    assert spec.kv_bytes_per_token(2) == 524_288


def test_rope_parameters_equal_theta_and_scaling():
    newer = {key: value for key, value in LLAMA_3_1B.items() if not key.startswith("rope")}
    newer["rope_parameters"] = LLAMA_3_ROPE | {"rope_theta": 500000.0}
    older = ModelSpec.from_hugging_face(LLAMA_3_1B)
    assert rotary_of_model(ModelSpec.from_hugging_face(newer)) == rotary_of_model(older)
    newer["rope_parameters"] = {"rope_theta": 7.0, "rope_type": "default"}
    assert rotary_of_model(ModelSpec.from_hugging_face(newer)) == Rotary(64, 64, 7.0, own=64)


def test_spec_reads_linear_scaling_under_its_older_name():
    spec = ModelSpec.from_hugging_face(LLAMA_2_7B | {"rope_scaling": {"type": "linear", "factor": 2}})
    assert rotary_of_model(spec).scaling == Scaling(kind="linear", factor=2.0, original=4096)


def test_num_active_parameters_counts_the_top_k_experts():
    experts = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    dense, mixed = (ModelSpec.from_hugging_face(LLAMA_2_7B | more) for more in ({}, experts))
    one = 3 * 4096 * 11008
    assert mixed.num_parameters - dense.num_parameters == 32 * (7 * one + 8 * 4096)
    assert mixed.num_active_parameters - dense.num_active_parameters == 32 * (one + 8 * 4096)


def test_num_parameters_includes_biases():
    plain = ModelSpec.from_hugging_face(LLAMA_2_7B)
    biased = ModelSpec.from_hugging_face(LLAMA_2_7B | {"attention_bias": True, "mlp_bias": True})
    per_layer = 4 * 4096 + 2 * 11008 + 4096
    assert biased.num_parameters - plain.num_parameters == 32 * per_layer


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported. Known: LlamaForCausalLM"),
        ({"architectures": None}, "`architectures` must name one of: LlamaForCausalLM, Qwen2ForCausalLM, "),
        ({"vocab_size": 0}, "`vocab_size` must be an integer >= 1 and <= 16777216. Given: 0"),
        ({"vocab_size": None}, "`vocab_size` must be an integer >= 1 and <= 16777216. Given: None"),
        ({"hidden_size": "4096"}, "`hidden_size` must be an integer >= 1 and <= 1048576. Given: '4096'"),
        ({"num_hidden_layers": True}, "`num_hidden_layers` must be an integer >= 1 and <= 1024. Given: True"),
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers` must be an integer >= 1 and <= 1024. Given: 1000000000"),
        ({"num_hidden_layers": 10**300}, "`num_hidden_layers` must be an integer >= 1 and <= 1024"),
        ({"hidden_size": 2**20, "num_attention_heads": 2}, "`head_dim` must be an integer >= 1 and <= 1024"),
        ({"rope_theta": 10**400}, "`rope_theta` must be a number from 2 to 1e+30"),
        ({"rms_norm_eps": 2}, "`rms_norm_eps` must be a number from 1e-30 to 1. Given: 2"),
        ({"eos_token_id": [1] * 300}, "`eos_token_id` must have at most 256 token ids"),
        ({"num_attention_heads": 0}, "`num_attention_heads` must be an integer >= 1"),
        ({"num_key_value_heads": 5}, "`num_attention_heads` must be a multiple of `num_key_value_heads` 5. Given: 32"),
        ({"head_dim": 63}, "`head_dim` must be even for rotary embeddings, is 63. Given: 63"),
        ({"hidden_act": "gelu"}, "`hidden_act` must be silu. Given: 'gelu'"),
        ({"rms_norm_eps": 0}, "`rms_norm_eps` must be a number from 1e-30 to 1. Given: 0"),
        ({"rms_norm_eps": float("nan")}, "`rms_norm_eps` must be a number from 1e-30 to 1. Given: nan"),
        ({"tie_word_embeddings": 1}, "`tie_word_embeddings` must be true or false. Given: 1"),
        ({"eos_token_id": "2"}, "`eos_token_id` must be a token id or a list of them"),
        ({"eos_token_id": 32000}, "`eos_token_id` must be less than `vocab_size` 32000. Given: 32000"),
        (
            {"rope_scaling": {"type": "spiral", "factor": 2}},
            "`type` must be default or linear or dynamic",
        ),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1]}}, "`short_factor` must be a list of 64 numbers"),
        ({"architectures": ["Qwen4ForCausalLM"]}, "'Qwen4ForCausalLM' is not supported. Nearest: Qwen3ForCausalLM."),
        ({"architectures": ["IdeficsForVisionText2Text"]}, "'IdeficsForVisionText2Text' is not supported. K"),
        (
            {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {}},
            "is not supported. It accepts images; only text models are supported. Known: Llama",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: `factor` must be given for linear"),
        ({"rope_scaling": 2}, "`rope_scaling` must be an object. Given: 2"),
        (
            {"rope_scaling": LLAMA_3_ROPE | {"low_freq_factor": 9}},
            "`low_freq_factor` must be less than `high_freq_factor` 4.0. Given: 9",
        ),
    ],
)
def test_spec_refuses_invalid_values(changes, text):
    with pytest.raises(ModelError) as caught:
        ModelSpec.from_hugging_face(LLAMA_2_7B | changes, "m/config.json")
    assert str(caught.value).startswith("m/config.json: ")
    assert text in str(caught.value)


YARN = {"rope_type": "yarn", "factor": 4.0}
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1}


@pytest.mark.parametrize(
    ("family", "changes", "text"),
    [
        ("mistral", {"sliding_window": 0}, "`sliding_window` must be an integer >= 1. Given: 0"),
        ("gemma3", {"sliding_window": -1}, "`sliding_window` must be an integer >= 1. Given: -1"),
        ("gemma3", {"sliding_window_pattern": 0}, "`sliding_window_pattern` must be an integer >= 1. Given: 0"),
        (
            "gemma2",
            {"layer_types": ["full_attention"]},
            "`layer_types` must be a list of 3 values, each full_attention or",
        ),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, "`no_rope_layers` must be a list of 3 values, each 0 or 1"),
        ("llama", {"head_dim": -32}, "`head_dim` must be an integer >= 1 and <= 1024. Given: -32"),
        ("llama", {"rope_theta": 1}, "`rope_theta` must be a number from 2 to 1e+30. Given: 1"),
        ("llama", {"rope_scaling": YARN | {"factor": float("nan")}}, "`factor` must be a number from 1e-30 to 1e+30"),
        ("llama", {"rope_scaling": YARN | {"factor": 1e300}}, "`factor` must be a number from 1e-30 to 1e+30"),
        ("llama", {"rope_scaling": YARN | {"beta_fast": 1e-320}}, "`beta_fast` must be a number from 1e-30 to 1e+30"),
        ("llama", {"rope_scaling": YARN | {"attention_factor": 1e9}}, "must be a number from 1e-30 to 1024. Given: 10"),
        (
            "llama",
            {"rope_scaling": YARN | {"original_max_position_embeddings": 1}},
            "must be an integer >= 2. Given: 1",
        ),
        (
            "llama",
            {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2}},
            "rope_scaling: `type` must not be dynamic: it needs at least 4 rotated elements per head, not 2. Given: "
            "'dynamic'",
        ),
        ("phi3", {"partial_rotary_factor": 0.01}, "`partial_rotary_factor` must select an even number of the 32"),
        ("granite", {"logits_scaling": 1e-320}, "`logits_scaling` must be a number from 1e-30 to 1e+30. Given: 1e-320"),
        ("qwen3, experts", {"num_experts": 0}, "`num_experts` must be an integer >= 1 and <= 4096. Given: 0"),
        (
            "qwen2, experts",
            {"num_experts_per_tok": 6},
            "`num_experts_per_tok` must be at most the number of experts; there are 5. Given: 6",
        ),
        (
            "mixtral",
            {"num_experts_per_tok": 5},
            "`num_experts_per_tok` must be at most the number of experts; there are 4",
        ),
        ("mixtral", {"hidden_size": 72}, "`hidden_size` must be a multiple of 16 in a model with experts. Given: 72"),
        (
            "mixtral",
            {"intermediate_size": 2**20 - 1},
            "`intermediate_size` must be at most 524288 for 4 experts. Given: 1048575",
        ),
        ("deepseek2", {"qk_rope_head_dim": 15}, "`qk_rope_head_dim` must be even for rotary embeddings. Given: 15"),
        ("deepseek2", {"norm_topk_prob": True}, "`norm_topk_prob` must be false. Given: True"),
        ("deepseek2", {"moe_layer_freq": 2}, "`moe_layer_freq` must be 1. Given: 2"),
        (
            "deepseek2",
            {"num_attention_heads": 4096, "v_head_dim": 65536},
            "`num_attention_heads` times the 65552 elements of a head must be at most 1048576. Given: 4096",
        ),
        ("deepseek2", GROUPS | {"n_group": 4}, "`n_routed_experts` must be a multiple of `n_group` 4. Given: 6"),
        ("deepseek2", GROUPS | {"topk_group": 4}, "`topk_group` must be at most `n_group` 3. Given: 4"),
        (
            "deepseek2",
            GROUPS | {"num_experts_per_tok": 3},
            "`num_experts_per_tok` must be at most the number of experts in 1 of 3 groups; there are 6. Given: 3",
        ),
        (
            "deepseek3",
            {"n_shared_experts": 4096, "moe_intermediate_size": 2**10},
            "`n_shared_experts` times `moe_intermediate_size` 1024 must be at most 1048576. Given: 4096",
        ),
        ("qwen2, experts", {"shared_expert_intermediate_size": 2**31 - 2}, "must be an integer >= 1 and <= 1048576"),
        ("ernie, experts", {"moe_num_experts": 2**21}, "`moe_num_experts` must be an integer >= 1 and <= 4096. Given"),
        ("ernie, experts", {"moe_k": 6}, "`moe_k` must be at most the number of experts; there are 5. Given: 6"),
        (
            "hunyuan, experts",
            {"moe_topk": [6, 6, 6]},
            "`moe_topk` must be at most the number of experts; there are 5. Given: [6, 6, 6]",
        ),
        ("hunyuan, experts", {"moe_topk": [1, 2, 1]}, "`moe_topk` must be equal in all layers. Given: [1, 2, 1]"),
        (
            "hunyuan, experts",
            {"head_dim": 2, "rope_scaling": {"type": "dynamic", "alpha": 50.0}},
            "rope_scaling: `alpha` must be absent if only 2 elements of a head are rotated. Given: 50.0",
        ),
        ("gpt-neox", {"rotary_pct": 0.3}, "`rotary_pct` must select an even number of the 32 elements of a head"),
        ("gpt-neox", {"rotary_emb_base": 1}, "`rotary_emb_base` must be a number from 2 to 1e+30. Given: 1"),
        ("minimax", {"rotary_dim": 48}, "`rotary_dim` must select an even number of the 32 elements of a head"),
    ],
)
def test_spec_refuses_unsupported_features_by_name(family, changes, text):
    with pytest.raises(ModelError) as caught:
        ModelSpec.from_hugging_face(config_of(family) | changes, "m/config.json")
    assert str(caught.value).startswith("m/config.json: ")
    assert text in str(caught.value)


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2", "deepseek-v3.2", "glm-4.7-flash", "glm-5", "glm4-moe"])
def test_unknown_ways_to_choose_experts_are_refused(name):
    config = models.model(name).config
    for key, value, known in (("topk_method", "greedy", "noaux_tc"), ("scoring_func", "softmax", "sigmoid")):
        with pytest.raises(ModelError, match=f"`{key}` must be {known}. Given: '{value}'"):
            ModelSpec.from_hugging_face(config | {key: value}, "m/config.json")


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_share_their_row_and_column_permutations(name):
    """A permutation has up to 2 million numbers."""
    weights = ModelSpec.from_hugging_face(config_of(name)).network.weights
    orders = [order for each in weights for order in (each.rows, each.columns) if order is not None]
    assert len({id(each) for each in orders}) == len(set(orders))


def test_rotated_elements_of_minimax_are_not_rounded():
    config = config_of("minimax") | {"head_dim": 44, "rotary_dim": 30}
    (rotary,) = ModelSpec.from_hugging_face(config).network.rotaries
    assert rotary.rotary_dim == 30


def test_sliding_windows_may_start_in_the_first_layer():
    spec = ModelSpec.from_hugging_face(config_of("qwen2") | {"max_window_layers": 0})
    assert spec.layout.windows == (LayerWindow(7),)


odd_values = st.sampled_from([0, -1, 1, 2, 3, 15, 2**20 - 1, 2**31, 10**400, 1e-320, 1e-30, 1e30, 1e308, -math.inf])
json_values = st.recursive(
    odd_values | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)
ROPE_KEYS = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "rope_theta")
MORE_KEYS = {"rope_parameters", "hidden_act", "attention_bias", "layer_types", "n_group", "topk_group", "eos_token_id"}
KEYS = MORE_KEYS.union(*(config_of(name) for name in CONFIGS))


@given(
    st.sampled_from(sorted(CONFIGS)),
    st.dictionaries(st.sampled_from(sorted(KEYS)), json_values, max_size=2),
    st.sampled_from(["default", *ROPE_SCALINGS]),
    st.dictionaries(st.sampled_from(ROPE_KEYS), json_values, max_size=1),
)
def test_spec_of_any_value_is_finite_or_an_error(family, changes, kind, rope):
    scaling = {"rope_type": kind, "factor": 4.0, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16} | rope
    try:
        spec = ModelSpec.from_hugging_face(config_of(family) | {"rope_scaling": scaling} | changes)
    except ModelError:
        return
    assert spec.num_parameters > 0
    assert all(np.isfinite(each.cos(300)).all() for each in spec.network.rotaries)
    of_roles = [item for each in spec.network.operations for item in each.attributes.items()]
    numbers = [value for role, value in of_roles if role != "high"]  # a limit of Mamba-2, which may be infinite
    assert np.isfinite(np.array([each for each in numbers if isinstance(each, float)], np.float32)).all()


def test_spec_is_read_from_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_7B))
    assert ModelSpec.from_folder(tmp_path) == ModelSpec.from_hugging_face(LLAMA_2_7B)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "has no config.json: a model is a folder in Hugging Face form"),
        ("{", "cannot be read"),
        ("[]", "must be a JSON object. Given: []"),
        ("[" * 100000, "cannot be read"),
        (" " * (2**20 + 1), "must be at most 1048576 bytes"),
    ],
)
def test_spec_refuses_an_invalid_folder(tmp_path, content, text):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        ModelSpec.from_folder(tmp_path)
    assert text in str(caught.value)


def test_spec_refuses_a_missing_folder(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        ModelSpec.from_folder(tmp_path / "none")


def test_spec_from_mindformers_derives_intermediate_size():
    config = {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "vocab_size": 32000, "multiple_of": 256}
    config |= {"seq_length": 4096, "rms_norm_eps": "1e-5", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    spec = ModelSpec.from_mindformers(config)
    keys = ("intermediate_size", "num_key_value_heads", "rms_norm_eps")
    assert [spec.config_value(key) for key in keys] == [11008, 32, 1e-5]
    assert (spec.max_position_embeddings, spec.eos_token_ids, spec.pad_token_id) == (4096, (2,), 0)
    grouped = {"hidden_size": 8192, "num_heads": 64, "n_kv_heads": 8, "multiple_of": 4096, "ffn_dim_multiplier": 1.3}
    spec = ModelSpec.from_mindformers(config | grouped)
    assert (spec.config_value("intermediate_size"), spec.caches[0]) == (28672, CacheShape(8, 128, 128))


def test_spec_has_a_quantization_scheme_or_refuses_it():
    given = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    assert ModelSpec.from_hugging_face({**LLAMA_2_7B, "quantization_config": given}).scheme.description == (
        "GPTQ, 4 bits, groups of 128"
    )
    assert ModelSpec.from_hugging_face({**LLAMA_2_7B, "quantization_config": None}).scheme is None
    with pytest.raises(ModelError, match="the weights are quantised by GPTQ, 3 bits, which cannot be served"):
        ModelSpec.from_hugging_face({**LLAMA_2_7B, "quantization_config": {"quant_method": "gptq", "bits": 3}})


CLASS_DEFAULTS = [
    ("mistral", "sliding_window", 4096),
    ("mixtral", "rope_theta", 1e6),
    ("mixtral", "rms_norm_eps", 1e-5),
    ("phi3", "rms_norm_eps", 1e-5),
    ("glm", "rms_norm_eps", 1.5625e-07),
    ("glm4", "rms_norm_eps", 1.5625e-07),
    ("gemma2", "attn_logit_softcapping", 50.0),
    ("gemma2", "final_logit_softcapping", 30.0),
    ("smollm3", "rope_theta", 2e6),
    ("qwen2", "sliding_window", 4096),
    ("qwen2", "max_window_layers", 28),
]
"""Defaults of `transformers` classes for missing configuration values, where families differ."""


def shape_of(config):
    network = ModelSpec.from_hugging_face(config).network
    return network.rotaries, [(each.kind, each.attributes) for each in network.operations]


@pytest.mark.parametrize(("name", "key", "value"), CLASS_DEFAULTS)
def test_spec_defaults_are_those_of_the_family_class(name, key, value):
    config = {**config_of(name), "num_hidden_layers": 30}
    changed = value + 1 if isinstance(value, int) else value * 2
    assert shape_of(config | {key: value}) != shape_of(config | {key: changed})
    del config[key]
    assert shape_of(config) == shape_of(config | {key: value})


@pytest.mark.parametrize(
    ("name", "key"),
    [("mistral", "sliding_window"), ("gemma2", "attn_logit_softcapping"), ("gemma2", "final_logit_softcapping")],
)
def test_spec_distinguishes_null_from_an_absent_key(name, key):
    config = config_of(name)
    with_null = shape_of(config | {key: None})
    del config[key]
    assert with_null != shape_of(config)
