"""Section `scheduler_config`: its keys, their checks, and the default token budget of a step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llm_serving.config.paths import Kind
from llm_serving.config.rules import BOOLEAN, MEMORY, boolean, choice, integer, number, option, path, positive
from llm_serving.config.sections.device import PROGRAM_KERNELS
from llm_serving.config.values import Values
from llm_serving.core.enums import ImplementationName, OrderName, PolicyName, SpeculativeMethodName
from llm_serving.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Section `scheduler_config`: the order of requests, the composition of steps, and the limits of the queue."""

    policy: str = option(PolicyName.PREFILL_FIRST.value, choice(tuple(PolicyName)), reloadable=True)
    """What the scheduler puts into a step first, within the limits below. `prefill_first`: waiting prompts.
    `decode_first`: running requests alone. `mixed`: running requests, then chunks of prompts. `throughput`: prompts or
    running requests, by the lower estimated loss of time. `fcfs`: first come, first served, regardless of class and
    priority."""
    order: str | None = option(None, choice(tuple(OrderName)), reloadable=True)
    """Which waiting request of a class is scheduled next. `fair`: one of the tenant that has received the fewest
    tokens. `arrival`: the oldest. `shortest`: the one with the shortest predicted duration. `deadline`: the one with
    the earliest deadline. null: `fair` with `tenant_fairness`, else `arrival`. With `policy: fcfs`: `arrival` only."""
    max_prefill_tokens: int = option(2048, integer(1, 2**20), derived=True, reloadable=True)
    """Token budget of one step (vLLM's max_num_batched_tokens); a longer prompt is computed in chunks, and a longer
    input of an encoder is refused. Minimum: `model_config.decode_batch_size`. null: 2048; on a CPU 512, less for a
    large model (256 with 7 billion parameters). This default is raised to `decode_batch_size` + 128 and, for an
    encoder, to the longest input, up to 8192 tokens."""
    max_waiting_queue: int = option(2000, integer(1, 10**6), reloadable=True)
    """Maximum number of waiting requests. When it is reached, further requests are refused with 429 and Retry-After."""
    slo_refusal_factor: float | None = option(
        None, number("must be a number >= 1", lambda value: value >= 1), reloadable=True
    )
    """Load shedding: a request gets 429 with Retry-After if its predicted time to first token exceeds the `ttft_slo_s`
    of its class times this factor. null: never."""
    max_running_per_tenant: int | None = option(None, integer(1, 10**6), reloadable=True)
    """Maximum number of running requests of one tenant on all replicas together; further ones wait. A tenant is an API
    key, else the `user` of the request, else all requests without either. null: no limit."""
    prefix_caching: bool = option(True, BOOLEAN, reloadable=True)
    """True: KV blocks of finished requests are kept while there is room, and reused for prompts with the same prefix,
    within one tenant and `cache_salt`."""
    speculative_method: str = option("ngram", choice(tuple(SpeculativeMethodName)))
    """Speculative decoding, which changes no token of a response. `ngram`: the tokens that followed an earlier
    occurrence of the newest tokens, in the prompt, the output or the tenant's finished responses, become draft tokens.
    `draft_model`: the same, and the model of `draft_model_path` where the lookup finds none. `mtp`: the same, with the
    model's own layer for multi-token prediction, for DeepSeek-V3 and later, GLM-4.5 and later, Qwen3-Next and Qwen3.5
    on a CPU with `kernels: program`; its memory is taken from the KV cache. `none`: no draft tokens. The server
    verifies draft tokens only where the expected gain exceeds the cost."""
    draft_model_path: Path | None = option(
        None,
        path(Kind.FILE_OR_FOLDER),
        only_with=("scheduler_config.speculative_method", SpeculativeMethodName.DRAFT_MODEL.value),
    )
    """Folder in Hugging Face form, or GGUF file, of a small model with the same vocabulary, for each WorkAgent. Its
    memory is taken from the KV cache."""
    max_waiting_tokens: int | None = option(None, integer(1), expert=True, reloadable=True)
    """Maximum number of prompt tokens in the queue, at least the longest prompt. Beyond it, requests are refused with
    429 and Retry-After. null: no limit."""
    enable_mixed_chunk: bool = option(True, boolean({"mixed": True, "separate": False}), expert=True)
    """True: a step may mix prefill chunks and decodes. False: it has one kind, which suits Ascend's attention."""
    async_scheduling: bool = option(True, BOOLEAN, expert=True)
    """True: the scheduler forms step k+1 while the device computes step k. False: the device waits meanwhile."""
    max_consecutive_prefill_steps: int = option(1, integer(1, 10**6), derived=True, expert=True, reloadable=True)
    """Maximum number of prefill-only steps between two tokens of a running request, or fewer by the weight of its
    class. Larger values improve the time to first token and increase the inter-token latency. null: 1, or 4 with
    `enable_mixed_chunk: False`."""
    max_consecutive_decode_steps: int = option(16, integer(1, 10**6), expert=True, reloadable=True)
    """With `policy: decode_first`: maximum number of decode-only steps while prompts wait."""
    prefill_time_ms_per_req: float = option(600.0, positive("milliseconds"), expert=True, reloadable=True)
    """With `policy: throughput`: estimated delay of each decoding request, in ms, by the prefill of one prompt."""
    decode_time_ms_per_req: float = option(50.0, positive("milliseconds"), expert=True, reloadable=True)
    """With `policy: throughput`: estimated loss, in ms, of a decode step for each empty running slot."""
    max_long_prefill_tokens: int | None = option(None, integer(1, 2**20), expert=True, reloadable=True)
    """Maximum number of tokens of one prompt in a step while other prompts wait. null: half of `max_prefill_tokens`."""
    tenant_fairness: bool = option(True, BOOLEAN, expert=True, reloadable=True)
    """Without `order`, True means `order: fair`, and False means `order: arrival`."""
    max_overtakes: int = option(16, integer(0, 10**6), expert=True, reloadable=True)
    """Bypass count: how many requests of a class may be scheduled before the oldest one, because of `order` or
    priority."""
    max_head_start_steps: int = option(256, integer(0, 10**6), expert=True, reloadable=True)
    """Maximum priority boost, in steps. One unit of `priority` moves a request within its class as if it had arrived
    earlier or later by the `ageing_steps` of the class."""
    quantum_steps: int = option(64, integer(1, 10**6), expert=True, reloadable=True)
    """Scheduling quantum of weighted fair queueing: steps for which a request beyond the share of its class keeps its
    running slot before a waiting request of a higher class preempts it."""
    max_preemptions_per_request: int = option(8, integer(0, 10**6), expert=True)
    """Maximum number of preemptions of one request. After that, the request keeps its KV blocks until it finishes."""
    preemption_mode: str = option("recompute", choice(("recompute", "swap", "auto")), expert=True, reloadable=True)
    """What happens to the KV blocks of a preempted request. `recompute`: they are freed and computed again. `swap`:
    they are copied to host memory (`pa_config.num_swap_blocks`) and back. `auto`: the cheaper of the two."""
    swap_block_cost_tokens: float = option(4.0, positive("tokens"), expert=True, reloadable=True)
    """With `preemption_mode: auto`: tokens that are recomputed in the time of swapping one block out and in."""
    num_speculative_tokens: int = option(16, integer(1, 64), expert=True)
    """Maximum draft length: draft tokens of one request in one step, up to the end of its last KV block."""
    prompt_lookup_min: int = option(3, integer(1, 16), expert=True)
    """Minimum n-gram length of the lookup, in tokens. The lookup tries an n-gram of twice this length first."""
    record_path: Path | None = option(None, path(Kind.MADE_FOLDER), expert=True)
    """Folder, used by one server only, for recordings of the schedulers' inputs (token ids included) and decisions, for
    `llm-serving replay`. Relative to the working folder of the server. null: no recording."""
    record_file_bytes: int = option(16 * 2**20, MEMORY, expert=True)
    """Size in bytes at which a recording continues in a new file, or text such as "16MB"."""
    record_files: int = option(4, integer(1, 10**6), expert=True)
    """Maximum number of recording files of each scheduler. Above it, the oldest file is deleted."""


# --- token budget of a step -----------------------------------------------------------------------------------------

CPU_STEP_OPERATIONS: Final = 1.2e12
"""Arithmetic operations that a few CPU cores compute in about one second."""
CPU_STEP_TOKENS: Final = 512
"""Default token budget on a CPU; larger steps are no faster per token and delay streams."""
MIN_PROMPT_TOKENS: Final = 128
"""Minimum number of prompt tokens in the default token budget, besides one token for each running request. Matrix
products with this many rows reach 90 % of full speed.
"""
MAX_WHOLE_TOKENS: Final = 8192
"""Default limit on an input of an encoder, in tokens; a larger `max_prefill_tokens` raises it."""
SEPARATE_PREFILL_STEPS: Final = 4
"""Default of `max_consecutive_prefill_steps` without mixed steps. With 1, decode steps would take half of the time."""


def choose_step_budget(values: Values, spec: ModelSpec | None) -> None:
    """Set `max_prefill_tokens` and `max_consecutive_prefill_steps` where they are not given.

    On a CPU, `max_prefill_tokens` is `CPU_STEP_TOKENS`, halved until the matrix products (two operations for each
    weight and token) need at most `CPU_STEP_OPERATIONS`. On every device it is at least one token for each running
    request plus `MIN_PROMPT_TOKENS`; for an encoder also a whole input, up to `MAX_WHOLE_TOKENS`.
    """
    gap, mixed = "scheduler_config.max_consecutive_prefill_steps", "scheduler_config.enable_mixed_chunk"
    if not values.is_given(gap) and not values[mixed]:
        values.set(gap, SEPARATE_PREFILL_STEPS, mixed)
    name = "scheduler_config.max_prefill_tokens"
    if values.is_given(name):
        return
    tokens, source = values[name], "default"
    if spec is not None and values["device_config.device_target"] == "CPU":
        tokens, source = min(tokens, CPU_STEP_TOKENS), "device_config.device_target"
        while tokens > MIN_PROMPT_TOKENS and 2 * spec.num_active_parameters * tokens > CPU_STEP_OPERATIONS:
            tokens, source = tokens // 2, "size of the model"
    slots, long_prefill = "model_config.decode_batch_size", "scheduler_config.max_long_prefill_tokens"
    longest = "model_config.max_generate_length"
    whole = 0 if spec is None or spec.network.causal else min(values[longest], MAX_WHOLE_TOKENS)
    minima = (slots, values[slots] + MIN_PROMPT_TOKENS), (long_prefill, values[long_prefill] or 0), (longest, whole)
    for key, minimum in minima:
        if minimum > tokens:
            tokens, source = minimum, key
    if tokens != values[name]:
        values.set(name, tokens, source)


# --- checks ---------------------------------------------------------------------------------------------------------

_FOR_MTP: Final = (
    ("device_config.device_target", ("CPU",)),
    ("device_config.kernels", PROGRAM_KERNELS),
)
_FOR_DRAFT_MODEL: Final = (
    ("cluster_config.tensor_parallel", (1,)),
    ("model_config.mindir_path", (None,)),
    ("model_config.implementation", (ImplementationName.NATIVE,)),
)
"""(key, allowed values) if a draft model is used: it runs in one WorkAgent and needs the native implementation."""


def check_scheduler(values: Values, spec: ModelSpec | None) -> None:
    budget_key = "scheduler_config.max_prefill_tokens"
    budget, slots = values[budget_key], values["model_config.decode_batch_size"]
    if budget < slots:
        rule = f"must be at least model_config.decode_batch_size {slots}: a step has room for every running request"
        raise values.error(budget_key, rule)
    _check_order(values)
    _check_draft_model(values, spec)
    name = "scheduler_config.max_long_prefill_tokens"
    if values[name] is not None and values[name] > budget:
        raise values.error(name, f"must be <= {budget_key} {budget}, the token budget of a step")
    name, length = "scheduler_config.max_waiting_tokens", values["model_config.max_generate_length"]
    longest_prompt = min(max(values["model_config.seq_length"], default=length), length)
    if values[name] is not None and values[name] < longest_prompt:
        rule = f"must be >= {longest_prompt}, the longest prompt, which would always be refused otherwise"
        raise values.error(name, rule)


def _check_order(values: Values) -> None:
    name = "scheduler_config.order"
    order = values[name]
    if order not in (None, OrderName.ARRIVAL) and values["scheduler_config.policy"] == PolicyName.FCFS:
        raise values.error(name, "must be arrival, or be left out, with policy fcfs")
    if order == OrderName.FAIR and not values["scheduler_config.tenant_fairness"]:
        rule = "must not be fair while scheduler_config.tenant_fairness is False; leave one of them out"
        raise values.error(name, rule)


def _check_draft_model(values: Values, spec: ModelSpec | None) -> None:
    method, path = "scheduler_config.speculative_method", "scheduler_config.draft_model_path"
    uses_mtp = values[method] == SpeculativeMethodName.MTP
    if values[path] is None and not uses_mtp:
        if values[method] == SpeculativeMethodName.DRAFT_MODEL:
            raise values.error(method, f"must not be draft_model without {path}")
        return
    given = f"{method}: mtp" if uses_mtp else path
    for name, allowed in (*_FOR_DRAFT_MODEL, *(_FOR_MTP if uses_mtp else ())):
        values.require(name, allowed, f"with {given}")
    if uses_mtp and spec is not None and spec.mtp() is None:
        rule = "must not be mtp: the server uses no layer for multi-token prediction of this model"
        raise values.error(method, f"{rule}, {spec.architecture}")
