"""Section `scheduler_config`."""

from dataclasses import dataclass
from pathlib import Path

from llm_serving.config.kinds import Kind
from llm_serving.config.rules import (
    boolean,
    choice,
    integer,
    memory,
    number,
    option,
    path,
    positive,
)
from llm_serving.core.enums import OrderName, PolicyName, SpeculativeMethodName


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Section `scheduler_config`: who runs next, and the bounds on waiting."""

    policy: str = option(PolicyName.PREFILL_FIRST.value, choice(tuple(PolicyName)))
    """What a step begins with, within the bounds below. `prefill_first`: waiting prompts. `decode_first`: running
    requests alone. `mixed`: running requests, then chunks of prompts. `throughput`: whichever wastes less time.
    `fcfs`: by arrival, whatever class and priority."""

    order: str | None = option(None, choice(tuple(OrderName)))
    """Who of a class goes next. `fair`: the tenant served least. `arrival`: who came first. `shortest`: who is
    predicted to be done first. `deadline`: whose deadline is first. `fcfs` has no other order than `arrival`. None:
    `fair` with `tenant_fairness`, else `arrival`."""

    composition: str = option("mixed", choice(("mixed", "separate")))
    """`separate`: a step computes prompts or decodes, never both; Ascend's kernels want it."""

    max_prefill_tokens: int = option(2048, integer(1, 2**20))
    """Tokens. Budget of one step; a longer prompt is computed in chunks. Where it is not given, `choose_step_budget`
    fits it to the model and to the other limits."""

    max_consecutive_prefill_steps: int = option(1, integer(1, 10**6))
    """Steps. Most prefill-only steps between two tokens of a running request. Not given: 1, since a step that begins
    with decoding has room for nearly as much of prompts; 4 where `composition` separates them."""

    max_consecutive_decode_steps: int = option(16, integer(1, 10**6))
    """Steps. `decode_first`: most decode-only steps while prompts wait."""

    prefill_time_ms_per_req: float = option(600.0, positive("milliseconds"))
    """Milliseconds. `throughput`: what the prefill of one prompt costs each request that decodes."""

    decode_time_ms_per_req: float = option(50.0, positive("milliseconds"))
    """Milliseconds. `throughput`: what a decode step loses on each empty slot while prompts wait."""

    max_long_prefill_tokens: int | None = option(None, integer(1, 2**20))
    """Tokens of a step one prompt may take while others wait for a share of it. None: half of `max_prefill_tokens`."""

    max_waiting_queue: int = option(2000, integer(1, 10**6))
    """Requests. When so many wait, further ones are refused with 429."""

    max_waiting_tokens: int | None = option(None, integer(1))
    """Tokens. Most prompt tokens that wait; beyond, requests are refused with 429. None: no limit."""

    slo_refusal_factor: float | None = option(None, number("must be a number >= 1", lambda value: value >= 1))
    """A request whose predicted time to first token exceeds its class's `ttft_slo_s` times this is refused with 429.
    None: never."""

    tenant_fairness: bool = option(True, boolean())
    """Without `order`: within a class, the tenant served least goes first. False: by priority and arrival alone."""

    max_overtakes: int = option(16, integer(0, 10**6))
    """Times the oldest request of a class may be overtaken by others that the order or their priority puts first."""

    max_head_start_steps: int = option(256, integer(0, 10**6))
    """Steps by which `priority` moves a request forward or back in its class, at most; one step of priority moves it by
    the `ageing_steps` of the class."""

    turn_steps: int = option(64, integer(1, 10**6))
    """Steps that a request of a lower class may go on in a place beyond what its class's weight gives it, before a
    higher class that waits takes the place back."""

    max_running_per_tenant: int | None = option(None, integer(1, 10**6))
    """Most requests of one tenant that run at once, at all WorkAgents together; its others wait in nobody's way. A
    tenant is an API key, or the `user` a client names, or all who name none. None: no limit."""

    max_preemptions_per_request: int = option(8, integer(0, 10**6))
    """Times one request may lose its blocks; after that it keeps them until it ends."""

    preemption_mode: str = option("recompute", choice(("recompute", "swap", "auto")))
    """What becomes of the blocks of a preempted request. `recompute`: dropped, computed again. `swap`: moved out and
    in. `auto`: whichever is cheaper."""

    swap_block_cost_tokens: float = option(4.0, positive("tokens"))
    """Tokens recomputed in the time one block is moved out and in; `auto` swaps when that is cheaper."""

    prefix_caching: bool = option(True, boolean())
    """Keep the blocks of ended requests for prompts that begin the same, within one tenant and `cache_salt`."""

    schedule_ahead: bool = option(True, boolean())
    """Form step k+1 while step k is computed: near its end, where steps are long."""

    speculative_method: str = option("ngram", choice(tuple(SpeculativeMethodName)))
    """Guesses of what comes next, checked beside the next token; they change no byte of an answer. `ngram`: what
    followed where the same tokens stood before, in the prompt, the answer so far and the tenant's finished answers.
    `draft_model`: the same, and where nothing is found, what the model of `draft_model_path` would say. Requests whose
    guesses are right often enough get some, as long as more tokens come in the same time. `none`: nothing is
    guessed."""

    draft_model_path: Path | None = option(None, path(Kind.FILE_OR_FOLDER))
    """Folder in Hugging Face form, or GGUF file, of a small model with the same vocabulary, for `draft_model`; each
    WorkAgent loads it beside its model, and what it takes is taken from the KV cache. None: there is none."""

    num_speculative_tokens: int = option(16, integer(1, 64))
    """Tokens guessed for a request at a time, at most; as many as its last block has room for."""

    prompt_lookup_tokens: int = option(3, integer(1, 16))
    """Tokens in a row that must have stood somewhere before, for `ngram`; twice as many are looked for first."""

    record_path: Path | None = option(None, path(Kind.MADE_FOLDER))
    """Folder where each scheduler's events and decisions are recorded, for `llm-serving replay`; token ids are among
    them. Relative to the folder the server was started in. None: nothing is recorded."""

    record_file_bytes: int = option(16 * 2**20, memory())
    """Bytes after which a file of a recording ends and the next begins, or text such as "16MB"."""

    record_files: int = option(4, integer(1, 10**6))
    """Files that are kept of each scheduler; the oldest is deleted."""
