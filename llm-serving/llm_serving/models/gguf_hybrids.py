"""The GGUF metadata of families that mix attention with state layers (Mamba-2, delta rule), and of related families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llm_serving.models.config_reader import MAX_LAYERS
from llm_serving.models.gguf_metadata import Architecture, Config, MetadataReader
from llm_serving.models.granite import MAMBA_KIND
from llm_serving.models.layers import FULL
from llm_serving.models.nemotron import ATTENTION, MAMBA, MLP
from llm_serving.models.nemotron import EXPERTS as EXPERT_LAYER
from llm_serving.models.qwen_next import LINEAR

EXPERTS: Final[Mapping[str, str]] = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
GRANITE: Final[Mapping[str, str]] = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def _mamba(reader: MetadataReader, config: Config) -> None:
    names = {"conv_kernel": "d_conv", "state_size": "d_state", "group_count": "n_groups", "time_step_rank": "n_heads"}
    config |= {f"mamba_{ours}": reader.positive(f"ssm.{name}") for name, ours in names.items()}
    config["mamba_d_ssm"] = reader.positive("ssm.inner_size")
    config["mamba_conv_bias"] = reader.has_in_layer("ssm_conv1d.bias")
    config["mamba_proj_bias"] = reader.has_in_layer("ssm_in.bias")


def _number_of_each_layer(reader: MetadataReader, config: Config, name: str) -> list[int]:
    numbers = reader.numbers(name)
    if numbers is None or len(numbers) != config["num_hidden_layers"]:
        raise reader.fail(reader.key(name), "must be a list with a number for each layer")
    return numbers


def _kv_heads(reader: MetadataReader, config: Config) -> list[int]:
    counts = _number_of_each_layer(reader, config, "attention.head_count_kv")
    config["num_key_value_heads"] = max(counts) or config["num_attention_heads"]
    return counts


def qwen_experts(reader: MetadataReader, config: Config) -> None:
    """Set `mlp_only_layers`: layers without a router. Set a missing expert size: dense size / experts per token."""
    layers, dense, used = (
        config["num_hidden_layers"],
        config.get("intermediate_size"),
        reader.needed("expert_used_count"),
    )
    if isinstance(layers, int) and layers <= MAX_LAYERS:
        config["mlp_only_layers"] = [i for i in range(layers) if not reader.has_tensor(f"blk.{i}.ffn_gate_inp.weight")]
    if "moe_intermediate_size" not in config and isinstance(dense, int) and isinstance(used, int):
        config["moe_intermediate_size"] = dense // max(1, used)
    if reader.architecture == "qwen2moe":
        config.setdefault("shared_expert_intermediate_size", dense)


def granite(reader: MetadataReader, config: Config) -> None:
    own = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config.setdefault("attention_multiplier", own**-0.5)


def _granite_hybrid(reader: MetadataReader, config: Config) -> None:
    granite(reader, config)
    _mamba(reader, config)
    config["layer_types"] = [FULL if each else MAMBA_KIND for each in _kv_heads(reader, config)]
    config.setdefault("shared_intermediate_size", config.get("intermediate_size"))
    rotates = reader.value(reader.key("rope.scaling.finetuned"), False)
    config["position_embedding_type"] = "rope" if rotates else "nope"


def _falcon_h1(reader: MetadataReader, config: Config) -> None:
    """Read the sizes of Mamba-2 layers. Set no multiplier, because the weights in the file contain them."""
    _mamba(reader, config)
    config["mamba_rms_norm"] = reader.has_in_layer("ssm_norm.weight")


def _nemotron_h(reader: MetadataReader, config: Config) -> None:
    widths = _number_of_each_layer(reader, config, "feed_forward_length")
    kinds = [ATTENTION if heads else MAMBA for heads in _kv_heads(reader, config)]
    config["hybrid_override_pattern"] = "".join(
        MLP if width else kind for width, kind in zip(widths, kinds, strict=True)
    )
    config["intermediate_size"] = max(widths) or 1
    heads, inner = reader.positive("ssm.time_step_rank"), reader.positive("ssm.inner_size")
    config |= {"mamba_num_heads": heads, "mamba_head_dim": inner // heads}
    names = {"conv_kernel": "conv_kernel", "state_size": "ssm_state_size", "group_count": "n_groups"}
    config |= {ours: reader.positive(f"ssm.{name}") for name, ours in names.items()}
    config["use_conv_bias"] = reader.has_in_layer("ssm_conv1d.bias")


def _nemotron_experts(reader: MetadataReader, config: Config) -> None:
    """Read which layers have experts. Raise ModelError for grouped experts: files lack the number of groups to use."""
    _nemotron_h(reader, config)
    has_router = [reader.has_tensor(f"blk.{i}.ffn_gate_inp.weight") for i in range(config["num_hidden_layers"])]
    pattern = zip(config["hybrid_override_pattern"], has_router, strict=True)
    config["hybrid_override_pattern"] = "".join(EXPERT_LAYER if routed else kind for kind, routed in pattern)
    if (reader.own("expert_group_count") or 1) > 1:
        raise reader.fail(reader.key("expert_group_count"), "must be 1")
    config["norm_topk_prob"] = bool(reader.value(reader.key("expert_weights_norm"), False))
    first = has_router.index(True) if True in has_router else 0
    latent = reader.found.tensors.get(f"blk.{first}.ffn_latent_down.weight")
    config["moe_latent_size"] = None if latent is None else latent.shape[0]


def _delta(reader: MetadataReader, config: Config) -> None:
    predicting = reader.own("nextn_predict_layers") or 0
    if isinstance(predicting, int) and predicting:
        config["num_hidden_layers"] -= predicting
        config["num_nextn_predict_layers"] = predicting
    heads, inner = reader.positive("ssm.time_step_rank"), reader.positive("ssm.inner_size")
    config |= {"linear_num_value_heads": heads, "linear_value_head_dim": inner // heads}
    config["linear_num_key_heads"] = reader.positive("ssm.group_count")
    config["linear_key_head_dim"] = reader.positive("ssm.state_size")
    config["linear_conv_kernel_dim"] = reader.positive("ssm.conv_kernel")
    if heads % config["linear_num_key_heads"] or inner % heads:
        rule = f"must be a multiple of `ssm.group_count` that divides `ssm.inner_size` {inner}"
        raise reader.fail(reader.key("ssm.time_step_rank"), rule)
    if (recurrent := reader.of_layers("attention.recurrent_layers")) is not None:
        config["layer_types"] = [LINEAR if each else FULL for each in recurrent[: config["num_hidden_layers"]]]
    if reader.own("expert_count"):
        qwen_experts(reader, config)


_INTERVAL: Final[Mapping[str, str]] = {"full_attention_interval": "full_attention_interval"}
_DELTA_EXPERTS: Final[Mapping[str, str]] = {
    **EXPERTS,
    **_INTERVAL,
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_NEMOTRON_EPS: Final[Mapping[str, str]] = {
    f"attention.layer_norm_{kind}epsilon": "layer_norm_epsilon" for kind in ("", "rms_")
}
_NEMOTRON_BIAS: Final[Mapping[str, tuple[str, ...]]] = {"mlp_bias": ("ffn_up.bias",), "use_bias": ("ssm_in.bias",)}
_BIAS: Final[Mapping[str, tuple[str, ...]]] = {"attention_bias": ("attn_q.bias",)}

HYBRIDS: Final[Mapping[str, Architecture]] = {
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM",
        {
            **GRANITE,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        fixed={"separate_experts": True},
        bias=_BIAS,
        complete=_granite_hybrid,
        has_lists=True,
    ),
    "falcon-h1": Architecture("FalconH1ForCausalLM", fixed={"mamba_norm_before_gate": False}, complete=_falcon_h1),
    "nemotron_h": Architecture(
        "NemotronHForCausalLM", _NEMOTRON_EPS, bias=_NEMOTRON_BIAS, complete=_nemotron_h, has_lists=True, rotates=False
    ),
    "nemotron_h_moe": Architecture(
        "NemotronHForCausalLM",
        {
            **_NEMOTRON_EPS,
            "expert_count": "n_routed_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_group_count": "n_group",
        },
        bias=_NEMOTRON_BIAS,
        complete=_nemotron_experts,
        has_lists=True,
        rotates=False,
    ),
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM",
        _DELTA_EXPERTS,
        fixed={"separate_projections": True},
        bias=_BIAS,
        complete=_delta,
        rotates_a_part=True,
    ),
    "qwen35": Architecture("Qwen3_5ForCausalLM", _INTERVAL, bias=_BIAS, complete=_delta, rotates_a_part=True),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM",
        _DELTA_EXPERTS,
        fixed={"separate_experts": True},
        bias=_BIAS,
        complete=_delta,
        rotates_a_part=True,
    ),
}
