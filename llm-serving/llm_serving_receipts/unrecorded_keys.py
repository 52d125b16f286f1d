"""The configuration keys that receipts leave out. A neutral key changes no byte of a response. A derived key changes
bytes only through a value that another field of the receipt records.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

DERIVED_KEYS: Final[Mapping[str, str]] = {
    # Content of the model's files, and what computes the model.
    "model_config.model_path": "weights",
    "model_config.tokenizer_path": "tokenizer",
    "model_config.backend": "computed_by",
    "model_config.mindir_path": "weights",
    "model_config.mindir_ini": "weights",
    "device_config.kernels": "computed_by",
    "cluster_config.tensor_parallel": "computed_by",
    "model_config.max_generate_length": "max_model_len",
    "model_config.end_token": "end_token_ids",
    # How a request is parsed; the response follows from the parsed parameters alone.
    "model_config.generation_config": "sampling",
    "serving_config.special_tokens_in_content": "prompts",
    "serving_config.json_whitespace": "sampling",
    "serving_config.tool_call_parser": "sampling",
    "serving_config.reasoning_parser": "sampling",
    "serving_config.low_effort_token_budget": "sampling",
    "serving_config.medium_effort_token_budget": "sampling",
    "serving_config.high_effort_token_budget": "sampling",
}
"""Key that changes a byte only through another field of a receipt -> that field. Receipts do not repeat such keys."""

_NEUTRAL_KEYS: Final[tuple[tuple[str, str], ...]] = (
    # Names and locations.
    ("model_config", "model_name model_aliases model_hub model_revision model_cfg_path weights_folder"),
    # These keys must equal the model's own values, or only cause more requests to be refused.
    ("model_config", "vocab_size pad_token_id seq_length"),
    # Batch sizes and times.
    ("model_config", "prefill_batch_size decode_batch_size batch_waiting_time batching_strategy"),
    ("pa_config", "num_blocks num_swap_blocks num_state_slots disk_cache_path disk_cache_bytes decode_seq_length"),
    ("device_config", "num_threads max_device_memory"),
    # Without effect on generation, or about embeddings, which have no receipts.
    ("model_config", "page_attention pooling"),
    ("device_config", "save_graphs save_graphs_path"),
    # Order of requests, preemption and load shedding.
    (
        "scheduler_config",
        "policy order enable_mixed_chunk tenant_fairness max_overtakes max_head_start_steps quantum_steps",
    ),
    ("scheduler_config", "max_prefill_tokens max_long_prefill_tokens async_scheduling"),
    ("scheduler_config", "max_consecutive_prefill_steps max_consecutive_decode_steps"),
    ("scheduler_config", "prefill_time_ms_per_req decode_time_ms_per_req"),
    ("scheduler_config", "max_waiting_queue max_waiting_tokens slo_refusal_factor max_running_per_tenant"),
    ("scheduler_config", "max_preemptions_per_request preemption_mode swap_block_cost_tokens"),
    # Prefix caching and speculative decoding: a draft token is accepted only if the model chooses it.
    ("scheduler_config", "prefix_caching"),
    ("scheduler_config", "speculative_method draft_model_path num_speculative_tokens prompt_lookup_min"),
    # Recording of decisions.
    ("scheduler_config", "record_path record_file_bytes record_files"),
    # Number and location of the adapters. A receipt names the adapter that computed the answer.
    ("lora_config", "lora_modules lora_folder max_loras max_lora_rank max_cpu_loras"),
    # Number and location of processes.
    ("cluster_config", "engine address master_host secret_file replicas cpus_per_replica placement"),
    ("cluster_config", "weights weights_cache_path roles num_transfer_blocks rank_table_file"),
    ("serving_config", "agent_ports start_device_id routing"),
    ("serving_config", "step_timeout_s load_timeout_s max_worker_restarts exit_without_work_agents restart_wait_s"),
    # Access control and connection limits.
    ("serving_config", "server_ip server_port ssl_certfile ssl_keyfile ssl_keyfile_password_file"),
    ("serving_config", "anonymous_highest_class cors_origins allowed_hosts trusted_proxies ui max_live_viewers"),
    ("serving_config", "max_connections max_connections_per_address max_buffered_bytes max_pipelined_bytes"),
    ("serving_config", "max_buffered_response_bytes"),
    ("serving_config", "max_url_bytes max_header_bytes max_headers max_request_body_bytes"),
    (
        "serving_config",
        "header_timeout_s body_timeout_s idle_timeout_s write_timeout_s shutdown_timeout_s max_timeout_s",
    ),
    # A response that needs a larger grammar ends with an error.
    ("serving_config", "max_grammar_bytes max_grammar_states grammar_cache_size"),
    # Stored and shared responses.
    ("serving_config", "response_store_bytes batch_path batch_store_bytes batch_concurrency"),
    ("serving_config", "coalesce_identical_requests coalesced_response_bytes resume_streams resume_grace_s"),
    ("serving_config", "request_log request_log_path request_log_bytes request_log_age_s"),
    # Receipts, audits, logs and traces.
    ("serving_config", "receipts audit_every explain_requests timeline_steps"),
    ("serving_config", "log_level throughput_interval_s access_log otlp_endpoint log_file_bytes log_files"),
)

NEUTRAL_KEYS: Final = frozenset(f"{section}.{name}" for section, names in _NEUTRAL_KEYS for name in names.split())
