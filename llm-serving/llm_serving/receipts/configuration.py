"""Which keys of the configuration can change a byte of an answer: one table of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llm_serving.config.legacy import RENAMED
from llm_serving.config.schema import SECTIONS, ServingConfig

Setting = str | int | bool | None

SETTINGS: Final[Mapping[str, Setting]] = {
    "model_config.model_dtype": "bfloat16",
    "model_config.implementation": "native",
    "pa_config.block_size": 16,
    "device_config.device_target": "CPU",
    "device_config.exactness": "exact",
    "device_config.enable_graph_kernel": False,
    "device_config.graph_kernel_flags": "",
    "device_config.jit_level": "O0",
    "quant_config.quantization": None,
    "quant_config.group_size": 128,
    "quant_config.kv_cache_dtype": "auto",
}
"""Keys that can change a byte, which a receipt has; and what a receipt means that lacks one: what servers did before
there was the key, whatever its default is now."""

TOLD: Final[Mapping[str, str]] = {
    # What the files hold.
    "model_config.model_path": "weights",
    "model_config.tokenizer_path": "tokenizer",
    "model_config.backend": "computed_by",
    "model_config.mindir_path": "weights",
    "model_config.mindir_ini": "weights",
    "device_config.kernels": "computed_by",
    "cluster_config.tensor_parallel": "computed_by",
    "model_config.max_generate_length": "max_model_len",
    "model_config.end_token": "end_token_ids",
    # How a request is read; the tokens that come of it are computed from these alone.
    "model_config.generation_config": "sampling",
    "serving_config.json_whitespace": "sampling",
    "serving_config.tool_call_parser": "sampling",
    "serving_config.reasoning_parser": "sampling",
    "serving_config.low_effort_token_budget": "sampling",
    "serving_config.medium_effort_token_budget": "sampling",
    "serving_config.high_effort_token_budget": "sampling",
}
"""Keys that can change a byte through what another field of a receipt has, and that field."""

_WITHOUT_EFFECT: Final[tuple[tuple[str, str], ...]] = (
    # Names, and where things are found.
    ("model_config", "model_name model_aliases model_hub model_revision model_cfg_path"),
    # Must be what the model says, or refuse more.
    ("model_config", "vocab_size pad_token_id seq_length"),
    # How much at once, and when.
    ("model_config", "prefill_batch_size decode_batch_size batch_waiting_time batching_strategy"),
    ("pa_config", "num_blocks num_swap_blocks decode_seq_length"),
    ("device_config", "num_threads max_device_memory"),
    # Served alike whatever they say, only written down, or of vectors, which have no receipts.
    ("model_config", "page_attention pooling"),
    ("device_config", "save_graphs save_graphs_path"),
    # Who goes first, who gives way and who is refused.
    ("scheduler_config", "policy order enable_mixed_chunk tenant_fairness"),
    ("scheduler_config", "max_overtakes max_head_start_steps quantum_steps"),
    ("scheduler_config", "max_prefill_tokens max_long_prefill_tokens async_scheduling"),
    ("scheduler_config", "max_consecutive_prefill_steps max_consecutive_decode_steps"),
    ("scheduler_config", "prefill_time_ms_per_req decode_time_ms_per_req"),
    ("scheduler_config", "max_waiting_queue max_waiting_tokens slo_refusal_factor max_running_per_tenant"),
    ("scheduler_config", "max_preemptions_per_request preemption_mode swap_block_cost_tokens"),
    # Prefix caching and speculative decoding: a draft token is accepted only if the model chooses it.
    ("scheduler_config", "prefix_caching"),
    ("scheduler_config", "speculative_method draft_model_path num_speculative_tokens prompt_lookup_min"),
    # What is written down of decisions.
    ("scheduler_config", "record_path record_file_bytes record_files"),
    # Which processes compute, and where.
    ("cluster_config", "engine address master_host secret_file replicas cpus_per_replica placement"),
    ("cluster_config", "weights weights_cache_path roles num_transfer_blocks"),
    ("serving_config", "agent_ports start_device_id routing"),
    ("serving_config", "step_timeout_s load_timeout_s max_worker_restarts exit_without_work_agents restart_wait_s"),
    # Who may ask, from where, how much and for how long.
    ("serving_config", "server_ip server_port ssl_certfile ssl_keyfile ssl_keyfile_password_file"),
    ("serving_config", "anonymous_highest_class cors_origins allowed_hosts trusted_proxies ui max_live_viewers"),
    ("serving_config", "max_connections max_connections_per_address max_buffered_bytes max_pipelined_bytes"),
    ("serving_config", "max_buffered_response_bytes"),
    ("serving_config", "max_url_bytes max_header_bytes max_headers max_request_body_bytes"),
    (
        "serving_config",
        "header_timeout_s body_timeout_s idle_timeout_s write_timeout_s shutdown_timeout_s max_timeout_s",
    ),
    # An answer that needs a larger grammar ends with an error.
    ("serving_config", "max_grammar_bytes max_grammar_states grammar_cache_size"),
    # Answers and requests that are kept, or given to several as they are.
    ("serving_config", "response_store_bytes batch_path batch_store_bytes batch_concurrency"),
    ("serving_config", "coalesce_identical_requests coalesced_response_bytes resume_streams resume_grace_s"),
    ("serving_config", "request_log request_log_path request_log_bytes request_log_age_s"),
    # What is told of answers, and checked.
    ("serving_config", "receipts audit_every explain_requests timeline_steps"),
    ("serving_config", "log_level throughput_interval_s access_log otlp_endpoint log_file_bytes log_files"),
)

WITHOUT_EFFECT: Final = frozenset(f"{section}.{name}" for section, names in _WITHOUT_EFFECT for name in names.split())
"""Keys that change no byte."""


def settings_of(config: ServingConfig) -> dict[str, Setting]:
    """Every "section.key" that can change a byte, and its value."""
    settings: dict[str, Setting] = {}
    for key in SETTINGS:
        section, _, name = key.partition(".")
        settings[key] = getattr(getattr(config, SECTIONS[section][0]), name)
    return settings


def settings_told(configuration: Mapping[str, Setting]) -> dict[str, Setting]:
    """What a receipt says of every key that can change a byte, and of keys that this version does not know.

    Receipts of older servers have keys that change none, which are left out, under former names too, and lack newer
    ones.
    """
    return dict(SETTINGS) | {
        key: value
        for key, value in configuration.items()
        if key not in TOLD and RENAMED.get(key, key) not in WITHOUT_EFFECT
    }
