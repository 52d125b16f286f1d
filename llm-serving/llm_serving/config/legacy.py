"""Configuration besides the current keys: former keys, keys of other servers, and MindFormers' model YAML."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llm_serving.config.yaml_reader import Located, plain, read_yaml
from llm_serving.errors import ConfigError, ModelError, shorten
from llm_serving.models.spec import ModelSpec

RENAMED: Final[Mapping[str, str]] = {
    "scheduler_config.turn_steps": "scheduler_config.quantum_steps",
    "scheduler_config.composition": "scheduler_config.enable_mixed_chunk",
    "scheduler_config.schedule_ahead": "scheduler_config.async_scheduling",
    "scheduler_config.prompt_lookup_tokens": "scheduler_config.prompt_lookup_min",
    "serving_config.join_identical": "serving_config.coalesce_identical_requests",
    "serving_config.shared_answer_bytes": "serving_config.coalesced_response_bytes",
    "serving_config.whole_answer_bytes": "serving_config.max_buffered_response_bytes",
    "serving_config.grammars_kept": "serving_config.grammar_cache_size",
}
"""Former name of a key -> its current name. Former names are accepted for one release, with a notice."""

ALIASES: Final[Mapping[str, str]] = {
    # Older sample files have the waiting times in model_config; the older loader read them from serving_config.
    "serving_config.batch_waiting_time": "model_config.batch_waiting_time",
    "tokenizer.vocab_file": "model_config.tokenizer_path",
    "model_path.decode_ini": "model_config.mindir_ini",
    "device_config.prompt_attention": "device_config.exactness",
    # MindIE's names.
    "scheduler_config.prefillTimeMsPerReq": "scheduler_config.prefill_time_ms_per_req",
    "scheduler_config.decodeTimeMsPerReq": "scheduler_config.decode_time_ms_per_req",
    # vLLM's names, where the meaning is the same.
    "model_config.tokenizer": "model_config.tokenizer_path",
    "model_config.revision": "model_config.model_revision",
    "model_config.dtype": "model_config.model_dtype",
    "model_config.max_model_len": "model_config.max_generate_length",
    "model_config.served_model_name": "model_config.model_name",
    "serving_config.host": "serving_config.server_ip",
    "serving_config.port": "serving_config.server_port",
    "pa_config.num_gpu_blocks_override": "pa_config.num_blocks",
    "pa_config.enable_prefix_caching": "scheduler_config.prefix_caching",
    "scheduler_config.enable_prefix_caching": "scheduler_config.prefix_caching",
    "scheduler_config.max_num_batched_tokens": "scheduler_config.max_prefill_tokens",
    "scheduler_config.max_num_seqs": "model_config.decode_batch_size",
    "cluster_config.tensor_parallel_size": "cluster_config.tensor_parallel",
    **RENAMED,
}

_STEPS_ARE_PACKED: Final = "steps are packed and shapes are dynamic"
_GRAPH_BUILT_HERE: Final = "the graph is built from the model's folder"
_JOIN_AT_ONCE: Final = "prefilled requests join the running ones at the next step"
_INPUTS_BUILT_HERE: Final = "the inputs of a step follow from its requests"

WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "model_config.zactivate_len": _STEPS_ARE_PACKED,
    "model_config.model_type": _STEPS_ARE_PACKED,
    "model_config.seq_type": _STEPS_ARE_PACKED,
    "model_config.current_index": _STEPS_ARE_PACKED,
    "model_config.decode_batch_waiting_time": _JOIN_AT_ONCE,
    "serving_config.decode_batch_waiting_time": _JOIN_AT_ONCE,
    "model_path.prefill_model": _GRAPH_BUILT_HERE,
    "model_path.decode_model": _GRAPH_BUILT_HERE,
    "model_path.argmax_model": _GRAPH_BUILT_HERE,
    "model_path.topk_model": _GRAPH_BUILT_HERE,
    "model_path.prefill_ini": _GRAPH_BUILT_HERE,
    "model_path.post_model_ini": _GRAPH_BUILT_HERE,
    "scheduler_config.priority_ageing_steps": "each of the request_classes has its own ageing_steps",
    "tokenizer.type": "the tokenizer follows from its file",
    "basic_inputs.type": _INPUTS_BUILT_HERE,
    "extra_inputs.type": _INPUTS_BUILT_HERE,
    "warmup_inputs.type": _INPUTS_BUILT_HERE,
}

RANK_GRAPHS: Final = ("model_path.prefill_model", "model_path.decode_model")
"""Keys with lists of graph files. Older servers had one file, and one agent port, for each rank of a replica."""

OLDER_DTYPE_PREFIX: Final = "DataType."
"""The older servers write `model_dtype` with this prefix: "DataType.FLOAT16"."""

# --- MindFormers' model YAML ----------------------------------------------------------------------------------------

MINDFORMERS_TARGETS: Final[Mapping[str, str]] = {
    "context.device_target": "device_config.device_target",
    "context.device_id": "serving_config.start_device_id",
    "context.max_device_memory": "device_config.max_device_memory",
    "context.enable_graph_kernel": "device_config.enable_graph_kernel",
    "context.graph_kernel_flags": "device_config.graph_kernel_flags",
    "context.save_graphs": "device_config.save_graphs",
    "context.save_graphs_path": "device_config.save_graphs_path",
    "context.jit_level": "device_config.jit_level",
    "context.jit_config.jit_level": "device_config.jit_level",
    "parallel_config.model_parallel": "cluster_config.tensor_parallel",
    "model.model_config.block_size": "pa_config.block_size",
    "model.model_config.num_blocks": "pa_config.num_blocks",
    "model.model_config.vocab_size": "model_config.vocab_size",
    "model.model_config.eos_token_id": "model_config.end_token",
    "model.model_config.pad_token_id": "model_config.pad_token_id",
    "model.model_config.compute_dtype": "model_config.model_dtype",
}
"""Key of a MindFormers YAML -> key that gets its value if the serving YAML does not set it."""

MINDFORMERS_DTYPE: Final = "float16"

MUST_AGREE: Final = (
    "pa_config.block_size",
    "pa_config.num_blocks",
    "model_config.vocab_size",
    "model_config.end_token",
)
"""Keys that must be equal in the serving YAML and the MindFormers YAML. Otherwise responses would be garbled."""

_SHAPE_KEYS: Final = frozenset(
    "seq_length hidden_size num_layers num_heads n_kv_heads vocab_size intermediate_size multiple_of "
    "ffn_dim_multiplier rms_norm_eps theta bos_token_id eos_token_id pad_token_id head_dim max_position_embedding "
    "tie_word_embeddings qkv_has_bias extend_method scaling_factor quantization_config architectures model_type "
    "num_hidden_layers num_attention_heads num_key_value_heads max_position_embeddings rope_theta rope_scaling "
    "rope_parameters attention_bias hidden_act ffn_hidden_size kv_channels layernorm_epsilon padded_vocab_size "
    "rope_ratio add_qkv_bias multi_query_attention multi_query_group_num rmsnorm post_layer_norm add_bias_linear "
    "apply_residual_connection_post_layernorm".split()
)
_SILENT_KEYS: Final = frozenset({"context.mode", "model.model_config.type", "model.model_config.use_past"})
"""Keys of a MindFormers YAML that this server ignores without a notice, because its own value is fixed."""
CHECKPOINT_KEYS: Final = ("load_checkpoint", "model.model_config.checkpoint_name_or_path", "pretrained_model_dir")
"""Keys that name the weights, in the order of precedence. A YAML of MindFormers 2 has the last one."""
ADAPTER_KEY: Final = "model.model_config.pet_config"
PARALLEL_KEY: Final = "parallel_config.model_parallel"
MODE_KEY: Final = "context.mode"
_THETA_KEYS: Final = frozenset({"theta", "rope_theta", "rope_ratio", "rope_parameters"})
_SCALING_KEYS: Final = frozenset({"extend_method", "rope_scaling", "rope_parameters"})


@dataclass(frozen=True)
class MindFormersFile:
    path: Path
    values: dict[str, Located]
    """Key of the serving YAML -> value that the file gives it."""
    spec: ModelSpec | None
    has_theta: bool
    has_scaling: bool
    checkpoint: tuple[str, Located] | None
    notices: tuple[str, ...]


def read_mindformers(path: Path) -> MindFormersFile:
    """Read a MindFormers YAML. Report unknown keys as notices only."""
    root = read_yaml(path)
    values: dict[str, Located] = {}
    checkpoints: dict[str, Located] = {}
    notices = []
    ignored = []
    for key, item in _flatten(root):
        if item.value is None:
            continue
        target = MINDFORMERS_TARGETS.get(key)
        if key == ADAPTER_KEY:
            raise ConfigError(
                f"{item.where}: `{key}` must be left out: adapters of this file are not served. Merge the adapter into "
                f"the weights of the model, or serve the model without it. Given: {shorten(str(plain(item)))}"
            )
        if key in CHECKPOINT_KEYS:
            checkpoints |= {key: item} if item.value != "" else {}
        elif key == PARALLEL_KEY and (use := root.get("use_parallel")) is not None and use.value is not True:
            if item.value != 1:
                notices.append(
                    f"{item.where}: {key}: {item.value} has no effect with use_parallel: {use.value} "
                    f"({use.where}); cluster_config.tensor_parallel sets the number of ranks"
                )
        elif target is not None and not isinstance(item.value, list):
            if target in values and values[target].value != item.value:
                raise ConfigError(
                    f"{item.where}: `{key}` must be {values[target].value}, the value at {values[target].where}"
                )
            values[target] = item
        elif key.removeprefix("model.model_config.") not in _SHAPE_KEYS and key not in _SILENT_KEYS:
            ignored.append(key)
        if key == MODE_KEY and item.value not in (0, "GRAPH_MODE"):
            notices.append(f"{item.where}: {key} is read as 0: the network runs in graph mode")
    if ignored:
        notices.append(f"{path}: accepted without effect: {', '.join(ignored)}")
    shape = root.get("model", "model_config")
    given = {key for key, item in shape.items() if item.value is not None} if shape else set()
    has_theta, has_scaling = not given.isdisjoint(_THETA_KEYS), not given.isdisjoint(_SCALING_KEYS)
    checkpoint = next(((key, checkpoints[key]) for key in CHECKPOINT_KEYS if key in checkpoints), None)
    return MindFormersFile(path, values, spec_of(root), has_theta, has_scaling, checkpoint, tuple(notices))


def spec_of(root: Located) -> ModelSpec | None:
    """Return the model in a MindFormers YAML, or None if it has none. Raise ModelError if it cannot be served."""
    shape = root.get("model", "model_config")
    if shape is None or shape.get("hidden_size") is None:
        return None
    network = root.get("model", "arch", "type")
    network_class = network.value if network is not None and isinstance(network.value, str) else ""
    spec = ModelSpec.from_mindformers(plain(shape), shape.where, network_class)
    experts = root.get("moe_config", "expert_num")
    if experts is not None and isinstance(experts.value, int) and experts.value > 1:
        raise ModelError(
            f"{experts.where}: `moe_config.expert_num` must be 1: serve a model with experts from a folder in "
            f"Hugging Face form. Given: {experts.value}"
        )
    return spec


_NESTED: Final = {"context": "jit_config", "model": "model_config", "parallel_config": None}
"""Section of a MindFormers YAML that is read -> its nested section that is read too, or None."""


def _flatten(root: Located) -> Iterator[tuple[str, Located]]:
    for section, item in root.items():
        if section not in _NESTED:
            yield section, item
            continue
        for key, inner in item.items():
            if key == _NESTED[section]:
                yield from ((f"{section}.{key}.{name}", value) for name, value in inner.items())
            else:
                yield f"{section}.{key}", inner
