"""The GGUF metadata of single architectures as keys of a config.json; `models.gguf` converts the common metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llm_serving.errors import ModelError
from llm_serving.models.gguf_gemma import GEMMA, WINDOW, set_layer_windows
from llm_serving.models.gguf_hybrids import EXPERTS, GRANITE, HYBRIDS, granite, qwen_experts
from llm_serving.models.gguf_metadata import Architecture, Config, MetadataReader
from llm_serving.models.layers import CONVOLUTION, FULL

_RMS_NORM: Final = "attention.layer_norm_rms_epsilon"
_LAYER_NORM: Final = "attention.layer_norm_epsilon"
_CLASSIFIER: Final = "cls.output.weight"
_SHARED: Final[Mapping[str, str]] = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
_LOCAL: Final[Mapping[str, str]] = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_LATENT: Final[Mapping[str, str]] = {"attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank"}
_INDEXER: Final[Mapping[str, str]] = {
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}
_CONTEXT_OF_GLM_5_2: Final = 2**20
_QKV: Final = ("attn_q.bias", "attn_qkv.bias")
_ATTENTION_BIAS: Final[Mapping[str, tuple[str, ...]]] = {"attention_bias": _QKV}
_LLAMA_BIAS: Final[Mapping[str, tuple[str, ...]]] = {**_ATTENTION_BIAS, "mlp_bias": ("ffn_gate.bias",)}


def _llama(reader: MetadataReader, config: Config) -> None:
    """Set `architectures`: Mixtral for a file with experts, Mistral with a window, InternLM3 with only QKV biases."""
    if experts := config.get("num_local_experts"):
        config["architectures"] = ["MixtralForCausalLM"]
        reader.needed("expert_used_count")
    if window := reader.own("attention.sliding_window"):
        config["sliding_window"] = window
        if not experts:
            config["architectures"] = ["MistralForCausalLM"]
    elif config["attention_bias"] and not reader.has_tensor("blk.0.attn_output.bias"):
        config |= {"architectures": ["InternLM3ForCausalLM"], "qkv_bias": True, "bias": False}


def _phi3(reader: MetadataReader, config: Config) -> None:
    config["sliding_window"] = config.get("sliding_window") or None  # Phi-4 has a window of 0


def _phimoe(reader: MetadataReader, config: Config) -> None:
    """Use the one attention factor of a GGUF file as both mscales of longrope, for short and for long contexts."""
    _phi3(reader, config)
    config["lm_head_bias"] = reader.has_tensor("output.bias")
    if (scaling := config.get("rope_scaling")) is not None:
        factor = scaling.pop("attention_factor", 1.0)
        scaling |= {"short_mscale": factor, "long_mscale": factor}


def _minicpm3(reader: MetadataReader, config: Config) -> None:
    rotary = reader.needed("rope.dimension_count")
    config["qk_rope_head_dim"] = rotary
    config["qk_nope_head_dim"] = config.pop("head_dim", 0) - rotary
    if (scaling := config.get("rope_scaling")) is not None:
        scaling.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
        scaling.setdefault("attention_factor", 1.0)


def _llama4(reader: MetadataReader, config: Config) -> None:
    """Set `use_qk_norm` as llama.cpp does: files lack it. If the window is 0, no layer has chunks and all use RoPE."""
    config["use_qk_norm"] = config.get("num_local_experts") != 128
    if reader.own("attention.sliding_window") == 0:
        config |= {"attention_chunk_size": None, "no_rope_layers": [1] * config["num_hidden_layers"]}


def _baichuan(reader: MetadataReader, config: Config) -> None:
    """Rename the context length of the 13B model (40 layers), so that `models.baichuan` uses ALiBi, not rotation."""
    if config["num_hidden_layers"] == 40:
        config["model_max_length"] = config.pop("max_position_embeddings", None)


def _deepseek2(reader: MetadataReader, config: Config) -> None:
    """Read how experts are chosen. If no scoring function is named, a correction bias shows that it is a sigmoid."""
    _latent_attention(reader, config)
    if _scores(reader, 2 if reader.has_in_layer("exp_probs_b.bias") else 1, (1, 2)) == 2:
        config["architectures"] = ["DeepseekV3ForCausalLM"]
        _set_sigmoid_routing(config)
    elif reader.own("expert_group_count") not in (None, 0, 1):
        config["topk_method"] = "group_limited_greedy"


def _deepseek32(reader: MetadataReader, config: Config) -> None:
    _latent_attention(reader, config)
    _scores(reader, 2, (2,))
    _set_sigmoid_routing(config)


def _glm_dsa(reader: MetadataReader, config: Config) -> None:
    """Read which layers have an indexer of keys. If the file has no list, a context of 2^20 tokens means GLM-5.2."""
    _deepseek32(reader, config)
    if (flags := reader.of_layers("attention.indexer.types")) is not None:
        config["indexer_types"] = ["full" if each else "shared" for each in flags]
    elif (config.get("max_position_embeddings") or 0) >= _CONTEXT_OF_GLM_5_2:
        config |= {"index_topk_freq": 4, "index_skip_topk_offset": 3}


def _latent_attention(reader: MetadataReader, config: Config) -> None:
    """Read the sizes of heads. Files since 2025 store them under keys with `_mla`, older files under the usual keys."""
    rotary = reader.needed("rope.dimension_count")
    newer = reader.own("attention.key_length_mla") is not None
    suffix = "_mla" if newer else ""
    config.pop("head_dim", None)
    config["qk_rope_head_dim"] = rotary
    config["qk_nope_head_dim"] = reader.needed(f"attention.key_length{suffix}") - rotary
    config["v_head_dim"] = reader.needed(f"attention.value_length{suffix}")
    config["norm_topk_prob"] = _normalises(reader)
    _subtract_prediction_layers(reader, config)
    if config.get("rope_scaling", {}).get("rope_type") == "yarn":
        # The multiplier is a tenth of mscale_all_dim. With an equal mscale, cosines and sines are not scaled.
        weight = round(10 * (reader.own("rope.scaling.yarn_log_multiplier") or 0), 6)
        config["rope_scaling"] |= {"mscale": weight, "mscale_all_dim": weight} if weight else {"attention_factor": 1.0}


def _set_sigmoid_routing(config: Config) -> None:
    config |= {key: config.get(key) or 1 for key in ("n_group", "topk_group")}
    config.setdefault("routed_scaling_factor", 1.0)


def _normalises(reader: MetadataReader) -> bool:
    return bool(reader.value(reader.key("expert_weights_norm"), False))


def _scores(reader: MetadataReader, default: int, known: tuple[int, ...]) -> float:
    function = reader.own("expert_gating_func") or default
    if function not in known:
        names = " or ".join(f"{each} ({_SCORES[each]})" for each in known)
        raise reader.fail(reader.key("expert_gating_func"), f"must be {names}")
    return function


_SCORES: Final[Mapping[int, str]] = {1: "softmax", 2: "sigmoid"}


def _glm_experts(reader: MetadataReader, config: Config) -> None:
    _scores(reader, 2, (2,))
    config["norm_topk_prob"] = _normalises(reader)
    _subtract_prediction_layers(reader, config)


def _subtract_prediction_layers(reader: MetadataReader, config: Config) -> None:
    layers, predicting = config["num_hidden_layers"], reader.own("nextn_predict_layers") or 0
    if isinstance(layers, int) and isinstance(predicting, int):
        config["num_hidden_layers"] = layers - predicting
    config["num_nextn_predict_layers"] = predicting


def _minimax(reader: MetadataReader, config: Config) -> None:
    _scores(reader, 2, (2,))


def _ernie_experts(reader: MetadataReader, config: Config) -> None:
    config.setdefault("moe_num_shared_experts", 0)


def _hunyuan_experts(reader: MetadataReader, config: Config) -> None:
    inner = reader.needed("feed_forward_length")
    for name in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        if reader.own(name) not in (None, inner):
            raise reader.fail(reader.key(name), f"must be the feed_forward_length {inner}")


def _gpt_oss(reader: MetadataReader, config: Config) -> None:
    config["intermediate_size"] = reader.needed("expert_feed_forward_length")
    if "rope_scaling" in config:
        config["rope_scaling"]["truncate"] = False


def _mistral3(reader: MetadataReader, config: Config) -> None:
    growth, scaling = reader.own("attention.temperature_scale"), config.get("rope_scaling", {})
    weight = reader.own("rope.scaling.yarn_log_multiplier")
    if scaling.get("rope_type") == "yarn" and weight:
        scaling |= {"mscale": weight, "mscale_all_dim": weight}
    if growth:
        config["rope_scaling"] = {**scaling, "llama_4_scaling_beta": growth}


def _olmo2(reader: MetadataReader, config: Config) -> None:
    if config.get("sliding_window"):
        config["architectures"] = ["Olmo3ForCausalLM"]
        set_layer_windows(reader, config)


def _lfm2(reader: MetadataReader, config: Config) -> None:
    _set_layer_types(reader, config)
    config["block_auto_adjust_ff_dim"] = False


def _lfm2_experts(reader: MetadataReader, config: Config) -> None:
    _scores(reader, 2, (2,))
    _set_layer_types(reader, config)
    config["use_expert_bias"] = any(name.endswith(".exp_probs_b.bias") for name in reader.found.tensors)


def _set_layer_types(reader: MetadataReader, config: Config) -> None:
    counts = reader.numbers("attention.head_count_kv")
    if counts:
        config["layer_types"] = [FULL if each else CONVOLUTION for each in counts]
        config["num_key_value_heads"] = max(counts)


def _exaone4(reader: MetadataReader, config: Config) -> None:
    """Read which layers have a window. Older files of the model with 64 layers lack the size of the window, 4096."""
    if config["num_hidden_layers"] == 64:
        config.setdefault("sliding_window", 4096)
    config.setdefault("sliding_window", None)
    set_layer_windows(reader, config)


def _gpt_neox(reader: MetadataReader, config: Config) -> None:
    config["rotary_pct"] = config.pop("partial_rotary_factor", 1.0)
    config["use_parallel_residual"] = reader.value(reader.key("use_parallel_residual"), True)


def _stablelm(reader: MetadataReader, config: Config) -> None:
    config["use_parallel_residual"] = not reader.has_tensor("blk.0.ffn_norm.weight")


def _bert(reader: MetadataReader, config: Config) -> None:
    config["max_position_embeddings"] = _rows(reader, "position_embd.weight")
    config["type_vocab_size"] = _rows(reader, "token_types.weight")
    _classifier(reader, config, "BertForSequenceClassification")


def _modern_bert(reader: MetadataReader, config: Config) -> None:
    del config["rope_theta"]  # each kind of layer has its own base
    config["hidden_activation"] = reader.value(reader.key("hidden_activation"), "gelu")
    config["classifier_bias"] = reader.has_tensor("cls.bias")
    pooling = reader.value(reader.key("classifier.pooling_type"), 1)
    config["classifier_pooling"] = "mean" if pooling == 1 else "cls"
    _classifier(reader, config, "ModernBertForSequenceClassification")


def _rows(reader: MetadataReader, name: str) -> int:
    tensor = reader.found.tensors.get(name)
    if tensor is None or len(tensor.shape) != 2:
        raise ModelError(f"{reader.found.file}: must have a tensor {name} with two dimensions")
    return tensor.shape[0]


def _classifier(reader: MetadataReader, config: Config, family: str) -> None:
    if reader.has_tensor(_CLASSIFIER):
        config |= {"architectures": [family], "num_labels": _rows(reader, _CLASSIFIER)}


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture("LlamaForCausalLM", _LOCAL, bias=_LLAMA_BIAS, complete=_llama),
    "qwen2": Architecture("Qwen2ForCausalLM", bias={"qkv_bias": _QKV}),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        {**EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        fixed={"norm_topk_prob": False},
        bias={"qkv_bias": _QKV},
        complete=qwen_experts,
    ),
    "qwen3": Architecture("Qwen3ForCausalLM", bias=_ATTENTION_BIAS),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", EXPERTS, fixed={"norm_topk_prob": True}, bias=_ATTENTION_BIAS, complete=qwen_experts
    ),
    "phi3": Architecture("Phi3ForCausalLM", WINDOW, bias=_ATTENTION_BIAS, complete=_phi3, rotates_a_part=True),
    "internlm2": Architecture("LlamaForCausalLM", bias=_LLAMA_BIAS),
    "baichuan": Architecture("BaichuanForCausalLM", fixed={"separate_qkv": True}, complete=_baichuan),
    "chatglm": Architecture("GlmForCausalLM", bias=_ATTENTION_BIAS, rotates_a_part=True),
    "glm4": Architecture("Glm4ForCausalLM", bias=_ATTENTION_BIAS, rotates_a_part=True),
    "granite": Architecture("GraniteForCausalLM", GRANITE, bias=_LLAMA_BIAS, complete=granite),
    "granitemoe": Architecture(
        "GraniteMoeForCausalLM",
        {**GRANITE, **_LOCAL},
        fixed={"separate_experts": True},
        bias=_ATTENTION_BIAS,
        complete=granite,
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", bias=_LLAMA_BIAS),
    "seed_oss": Architecture(
        "SeedOssForCausalLM", bias={**_ATTENTION_BIAS, "attention_out_bias": ("attn_output.bias",)}
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", WINDOW, complete=_olmo2),
    "lfm2": Architecture(
        "Lfm2ForCausalLM", {_RMS_NORM: "norm_eps", "shortconv.l_cache": "conv_L_cache"}, complete=_lfm2, has_lists=True
    ),
    "lfm2moe": Architecture(
        "Lfm2MoeForCausalLM",
        {
            **EXPERTS,
            _RMS_NORM: "norm_eps",
            "shortconv.l_cache": "conv_L_cache",
            "leading_dense_block_count": "num_dense_layers",
        },
        complete=_lfm2_experts,
        has_lists=True,
    ),
    "exaone4": Architecture("Exaone4ForCausalLM", WINDOW, complete=_exaone4),
    "mistral3": Architecture("Ministral3ForCausalLM", complete=_mistral3),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", bias={"use_bias": _QKV}),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        {
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        bias={"use_bias": _QKV},
        complete=_ernie_experts,
    ),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", bias=_ATTENTION_BIAS),
    "hunyuan-moe": Architecture(
        "HunYuanMoEV1ForCausalLM",
        {"expert_count": "num_experts", "expert_used_count": "moe_topk"},
        bias=_ATTENTION_BIAS,
        complete=_hunyuan_experts,
    ),
    "minimax-m2": Architecture(
        "MiniMaxM2ForCausalLM", {**_LOCAL, "rope.dimension_count": "rotary_dim"}, complete=_minimax, rotates_a_part=True
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        {**_LOCAL, **WINDOW},
        fixed={"separate_experts": True},
        bias=_ATTENTION_BIAS,
        complete=_gpt_oss,
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        _SHARED,
        bias={**_ATTENTION_BIAS, "use_qk_norm": ("attn_q_norm.weight",)},
        complete=_glm_experts,
        rotates_a_part=True,
    ),
    "command-r": Architecture("CohereForCausalLM", {_LAYER_NORM: "layer_norm_eps", "logit_scale": "logit_scale"}),
    "cohere2": Architecture(
        "Cohere2ForCausalLM",
        {_LAYER_NORM: "layer_norm_eps", "logit_scale": "logit_scale", "attention.sliding_window": "sliding_window"},
    ),
    "stablelm": Architecture(
        "StableLmForCausalLM",
        {_LAYER_NORM: "layer_norm_eps"},
        bias={"use_qkv_bias": _QKV},
        complete=_stablelm,
        rotates_a_part=True,
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM", {_LAYER_NORM: "norm_epsilon"}, bias={"use_bias": ("attn_output.bias",)}
    ),
    "deepseek2": Architecture("DeepseekV2ForCausalLM", {**_SHARED, **_LATENT}, complete=_deepseek2),
    "deepseek32": Architecture("DeepseekV32ForCausalLM", {**_SHARED, **_LATENT, **_INDEXER}, complete=_deepseek32),
    "glm-dsa": Architecture("GlmMoeDsaForCausalLM", {**_SHARED, **_LATENT, **_INDEXER}, complete=_glm_dsa),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        {_LAYER_NORM: "layer_norm_eps", "rope.freq_base": "rotary_emb_base"},
        bias={"attention_bias": _QKV},
        complete=_gpt_neox,
        rotates_a_part=True,
    ),
    "phimoe": Architecture("PhimoeForCausalLM", {**_LOCAL, **WINDOW}, bias=_ATTENTION_BIAS, complete=_phimoe),
    "minicpm3": Architecture("MiniCPM3ForCausalLM", _LATENT, complete=_minicpm3),
    "llama4": Architecture(
        "Llama4ForCausalLM",
        {
            **_LOCAL,
            "feed_forward_length": "intermediate_size_mlp",
            "expert_feed_forward_length": "intermediate_size",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        fixed={"separate_experts": True},
        bias=_ATTENTION_BIAS,
        complete=_llama4,
    ),
    **GEMMA,
    **HYBRIDS,
    "bert": Architecture("BertModel", {_LAYER_NORM: "layer_norm_eps"}, complete=_bert),
    "modern-bert": Architecture(
        "ModernBertModel",
        {
            "attention.layer_norm_rms_epsilon": "norm_eps",
            _LAYER_NORM: "norm_eps",
            "rope.freq_base": "global_rope_theta",
            "rope.freq_base_swa": "local_rope_theta",
            "attention.sliding_window": "local_attention",
            "attention.sliding_window_pattern": "global_attn_every_n_layers",
        },
        bias={
            "attention_bias": ("attn_qkv.bias",),
            "mlp_bias": ("ffn_up.bias",),
            "norm_bias": ("ffn_norm.bias",),
        },
        complete=_modern_bert,
    ),
}
