"""Keys of older files that are accepted: which of them say nothing here, and which live under another name."""

from collections.abc import Mapping
from typing import Final

ALIASES: Final[Mapping[str, str]] = {
    # Every older sample writes the waiting times into model_config; the older loader read them from serving_config.
    "serving_config.batch_waiting_time": "model_config.batch_waiting_time",
    "tokenizer.vocab_file": "model_config.tokenizer_path",
    "model_path.decode_ini": "model_config.mindir_ini",
    "device_config.prompt_attention": "device_config.exactness",
    # MindIE's names.
    "scheduler_config.prefillTimeMsPerReq": "scheduler_config.prefill_time_ms_per_req",
    "scheduler_config.decodeTimeMsPerReq": "scheduler_config.decode_time_ms_per_req",
}
"""Key as written -> key that is meant."""

_STEPS_ARE_PACKED: Final = "steps are packed and shapes are dynamic"
_GRAPH_BUILT_HERE: Final = "the graph is built from the model's folder"
_JOIN_AT_ONCE: Final = "prefilled requests join the running ones at the next step"
_INPUTS_BUILT_HERE: Final = "the inputs of a step follow from its requests"

NO_MEANING: Final[Mapping[str, str]] = {
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
"""Key that is accepted and changes nothing -> why."""

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
    "model.model_config.block_size": "pa_config.block_size",
    "model.model_config.num_blocks": "pa_config.num_blocks",
    "model.model_config.vocab_size": "model_config.vocab_size",
    "model.model_config.eos_token_id": "model_config.end_token",
    "model.model_config.pad_token_id": "model_config.pad_token_id",
    "model.model_config.compute_dtype": "model_config.model_dtype",
}
"""Key of a MindFormers YAML -> key it fills when the serving YAML leaves it out."""

OLDER_DTYPE_PREFIX: Final = "DataType."
"""How the older servers write `model_dtype`, as in "DataType.FLOAT16"."""

MINDFORMERS_DTYPE: Final = "float16"
"""`compute_dtype` of a MindFormers YAML that does not give it."""

MUST_AGREE: Final = (
    "pa_config.block_size",
    "pa_config.num_blocks",
    "model_config.vocab_size",
    "model_config.end_token",
)
"""Keys that may stand in both files only with one value: two opinions on them garble text or miss its end."""

MINDFORMERS_SHAPE: Final = frozenset(
    "seq_length hidden_size num_layers num_heads n_kv_heads vocab_size intermediate_size multiple_of "
    "ffn_dim_multiplier rms_norm_eps theta bos_token_id eos_token_id pad_token_id head_dim max_position_embedding "
    "tie_word_embeddings qkv_has_bias extend_method scaling_factor quantization_config architectures model_type "
    "num_hidden_layers num_attention_heads num_key_value_heads max_position_embeddings rope_theta rope_scaling "
    "rope_parameters attention_bias hidden_act ffn_hidden_size kv_channels layernorm_epsilon padded_vocab_size "
    "rope_ratio add_qkv_bias multi_query_attention multi_query_group_num rmsnorm post_layer_norm add_bias_linear "
    "apply_residual_connection_post_layernorm".split()
)
"""Keys of `model.model_config` that `ModelSpec.from_mindformers` reads."""

MINDFORMERS_SILENT: Final = frozenset({"context.mode", "model.model_config.type", "model.model_config.use_past"})
"""Keys of a MindFormers YAML that only say what holds here anyway."""
