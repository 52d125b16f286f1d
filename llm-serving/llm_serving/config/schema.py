"""The typed configuration: one frozen dataclass a section, with unit and meaning under each key.

In YAML, `null` always means "not given": the default applies. Keys whose type allows None give that None a meaning.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from llm_serving.config.rules import (
    Rule,
    boolean,
    choice,
    host_names,
    integer,
    integers,
    largest,
    memory,
    model_names,
    name,
    number,
    one_of,
    option,
    origins,
    path,
    path_or_dash,
    path_or_first,
    positive,
    revision,
    row_name,
    seconds,
    sha256,
    share,
    text,
    url,
)
from llm_serving.core.choices import (
    EngineName,
    ExactnessName,
    JsonWhitespaceName,
    OrderName,
    PolicyName,
    QuantizationName,
    SpreadName,
    ToolFormatName,
)
from llm_serving.core.dtypes import MODEL_DTYPES
from llm_serving.core.request_class import DEFAULT_CLASSES, MAX_PRIORITY, RequestClass
from llm_serving.hub import HUBS, HubModel
from llm_serving.log import LEVELS
from llm_serving.network.coded import Quantization

BATCHING_STRATEGIES: Final = ("continuous", "static")
_DTYPE_ALIASES: Final = {alias: dtype.name for dtype in MODEL_DTYPES.values() for alias in dtype.aliases}
DEFAULT_MAX_GENERATE_LENGTH: Final = 4096
CLIENT_MODEL_NAMES: Final = ("llama2", "internlm", "tgi", "dummy")
"""Of the older servers' routes; of text-generation's and of huggingface_hub's clients, which send them on their own."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Section `model_config`: what is served, and the lengths and batch sizes it is served with."""

    model_name: str = option("model", name())
    """Name of the model in the HTTP routes. Not given: the name of the model's folder."""

    model_aliases: tuple[str, ...] = option(CLIENT_MODEL_NAMES, model_names())
    """Other names by which clients may ask for the model; answers tell `model_name`. `*`: any name. The default is what
    older servers' routes had and what clients send on their own."""

    model_path: Path | None = option(None, path())
    """Folder in Hugging Face form (config.json, *.safetensors, tokenizer), a GGUF file, or the name of a model at a
    hub, owner/name, where no such folder exists. The word `demo` is the shipped model."""

    model_hub: str = option("auto", choice(("auto", *HUBS)))
    """Where a model is looked up that `model_path` names. `auto`: in the local caches of Hugging Face and ModelScope,
    then at Hugging Face. One of them: only in its cache and there."""

    model_revision: str | None = option(None, revision())
    """Branch, tag or commit of a model that `model_path` names. None: the hub's main one."""

    generation_config: str = option("auto", choice(("auto", "none")))
    """`auto`: temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens of the model's
    generation_config.json are what OpenAI requests have that give none. `none`: the defaults of this server."""

    pooling: str = option("auto", choice(("auto", "last", "none")))
    """How a text becomes a vector (`/v1/embeddings`, `/v1/score`, `/v1/rerank`). `auto`: as the folder of an embedding
    model says; of another model there are none. `last`: of any model, the last hidden state of the last token, brought
    to length 1. `none`: those routes are refused."""

    tokenizer_path: Path | None = option(None, path())
    """Tokenizer file or folder. None: the one in `model_path`."""

    model_cfg_path: Path | None = option(None, path())
    """A MindFormers model YAML; its `context` and `model.model_config` fill what this file does not give."""

    max_generate_length: int = option(DEFAULT_MAX_GENERATE_LENGTH, integer(2))
    """Tokens. Most a request may hold, prompt and generated together. Not given: the model's positions, as far as the
    KV cache goes (4096 while no model is named)."""

    seq_length: tuple[int, ...] = option((), integers(1))
    """Tokens. Older files list prefill buckets; the longest is the longest prompt. Empty: `max_generate_length`."""

    vocab_size: int | None = option(None, integer(1))
    """Entries of the vocabulary. None: the model's own. A value that differs from the model's is an error."""

    end_token: int | None = option(None, integer(0))
    """Token id that ends a text. None: those of the model. A value the model does not name is an error."""

    pad_token_id: int | None = option(None, integer(0))
    """Token id for padding. None: the model's own. Steps are packed, so nothing is padded with it."""

    prefill_batch_size: int | None = option(None, largest(1))
    """Requests. Most prompts in one prefill step. None: no limit but `max_prefill_tokens`."""

    decode_batch_size: int = option(128, largest(1))
    """Requests. Most that run at once. Of a list, the largest counts."""

    batch_waiting_time: float = option(0.0, seconds())
    """Seconds an idle server waits for more prompts before it starts a prefill step (static batching: a batch)."""

    batching_strategy: str = option("continuous", choice(BATCHING_STRATEGIES))
    """`continuous`: the batch is formed anew at every step. `static`: collect a batch and run it to its end."""

    page_attention: bool = option(True, boolean())
    """The KV cache is paged always; False is accepted with a notice."""

    model_dtype: str = option("bfloat16", choice(MODEL_DTYPES, _DTYPE_ALIASES))
    """Type of weights, activations and KV cache: bfloat16, float16 or float32 (also `DataType.FLOAT16`)."""

    backend: str = option("kbk", choice(("kbk", "ge")))
    """`kbk`: MindSpore graph mode, kernel by kernel. `ge`: graphs of `mindir_path` by the graph engine of
    mindspore_lite, on Ascend; without `mindir_path` it is served as kbk with a notice."""

    mindir_path: Path | None = option(None, path())
    """Folder of graphs that `llm-serving export` wrote for this configuration, for `backend: ge`; weights and a cache
    of `pa_config.num_blocks` are in them."""

    mindir_ini: Path | None = option(None, path_or_first())
    """File of options of the graph engine for them, as older servers' `model_path.decode_ini` names one."""

    @property
    def max_input_len(self) -> int:
        """Tokens of the longest prompt."""
        return min(max(self.seq_length, default=self.max_generate_length), self.max_generate_length)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Section `serving_config`: addresses, limits at the door, the processes."""

    agent_ports: tuple[int, ...] = option((16002,), integers(1, 65535, unique=True))
    """One WorkAgent (a replica of the model) per entry. They and the master inherit what they talk through, so that
    none of these ports is opened."""

    start_device_id: int = option(0, integer(0, 1023))
    """Device of the first WorkAgent; the others take the following ones."""

    server_ip: str = option("127.0.0.1", text())
    """Address the HTTP server binds to."""

    server_port: int = option(8835, integer(0, 65535))
    """Port of the HTTP server. 0: any free port."""

    ssl_certfile: Path | None = option(None, path())
    """PEM file of the certificate, with those that lead to its authority; makes it HTTPS. None: HTTP. Files that change
    are read again within seconds, without a restart."""

    ssl_keyfile: Path | None = option(None, path())
    """PEM file of the certificate's private key. None: it is in `ssl_certfile`."""

    ssl_keyfile_password_file: Path | None = option(None, path())
    """File whose first line is the password of an encrypted private key. None: the key is not encrypted."""

    max_connections: int = option(1024, integer(1, 10**6))
    """Connections, handshakes included. Beyond, one that does not wait for an answer makes room, else 503."""

    max_connections_per_address: int = option(512, integer(1, 10**6))
    """Connections from one address (of IPv6, a network of 64 bits), by the same rule. A proxy is one address."""

    max_url_bytes: int = option(8192, integer(256, 65535))
    """Bytes. A longer URL is refused (414)."""

    max_header_bytes: int = option(32 * 1024, integer(1024, 2**20))
    """Bytes of a request line and its headers (431 beyond), and of what is not body within a chunked body."""

    max_headers: int = option(100, integer(8, 10**4))
    """Headers of a request; more are refused (431)."""

    max_request_body_bytes: int = option(4 * 2**20, integer(1024, 2**30))
    """Bytes. A longer request body is refused (413) while it is read."""

    max_pipelined_bytes: int = option(32 * 1024, integer(0, 2**30))
    """Bytes of further requests that are read while a connection waits for an answer; the rest stays unread."""

    max_buffered_bytes: int = option(32 * 2**20, integer(1024, 2**40))
    """Bytes that all connections together make the server hold: received and not read to the end, or written and not
    taken. Beyond, the connection that holds most is ended (503 where no answer has begun)."""

    header_timeout_s: float = option(10.0, positive("seconds"))
    """Seconds from a connection, or the first byte of a request, to the end of its headers (408); and for TLS's
    handshake."""

    body_timeout_s: float = option(60.0, positive("seconds"))
    """Seconds from the headers of a request to the end of its body (408)."""

    idle_timeout_s: float = option(30.0, positive("seconds"))
    """Seconds between two requests of a connection, then it is closed. An answer may take any time."""

    write_timeout_s: float = option(60.0, positive("seconds"))
    """Seconds in which a client must take 16 KiB of what was written to it, or all of it; else its connection is cut,
    its request aborted."""

    shutdown_timeout_s: float = option(30.0, seconds())
    """Seconds that running requests get to finish when the server is told to stop."""

    max_timeout_s: float = option(86400.0, positive("seconds"))
    """Seconds. Most that a request may give itself (`timeout_s`) until it ends with an error."""

    step_timeout_s: float = option(300.0, seconds())
    """Seconds. A WorkAgent that takes longer for one step counts as dead and is started again."""

    max_worker_restarts: int = option(5, integer(0, 1000))
    """Times in a row, without a step in between, that a WorkAgent which ended is started again before `/health` says
    that it may be gone for good. It is tried on all the same, with pauses of up to 5 s."""

    exit_without_work_agents: bool = option(False, boolean())
    """True: the server ends with exit code 3 when all its WorkAgents have used up `max_worker_restarts`."""

    restart_wait_s: float = option(300.0, seconds())
    """Seconds that requests wait for their WorkAgent to be started again; then they end with an error. Once a restart
    has failed, new requests are refused (503) until it is back."""

    explain_requests: int = option(1000, integer(0, 10**6))
    """Requests of each WorkAgent that ended, the newest, which `/v1/requests/{id}/explain` can still explain, beside
    all that live. 0: none, and no timeline."""

    timeline_steps: int = option(10000, integer(1, 10**7))
    """Steps of each WorkAgent, the newest, that explanations and `/v1/timeline` are made from."""

    response_store_bytes: int = option(2**26, integer(0, 2**40))
    """Bytes of memory for responses of /v1/responses that can be asked for and gone on with; the oldest make room. 0:
    none is kept."""

    batch_path: Path | None = option(None, path())
    """SQLite file for uploaded files, batches and their answers; relative to the folder the server was started in.
    None: there are no batches."""

    batch_store_bytes: int = option(2**30, memory())
    """Bytes that all files of batches may have together, or text such as "1GB"."""

    batch_concurrency: int | None = option(None, integer(1, 4096))
    """Lines of batches that are asked for at once. None: `decode_batch_size`."""

    max_grammar_bytes: int = option(2**16, integer(1024, 2**24))
    """Bytes that a JSON schema, regular expression or grammar for answers may have."""

    max_grammar_states: int = option(20_000, integer(100, 10**7))
    """States of the automaton that such a grammar may need while one answer is made, about 2 KB each; an answer that
    needs more ends with an error."""

    grammars_kept: int = option(64, integer(1, 10**5))
    """Grammars that are kept compiled, those asked for last."""

    json_whitespace: str = option(JsonWhitespaceName.SPACE, choice(tuple(JsonWhitespaceName)))
    """What may stand between the parts of JSON that an answer is bound to, where a request does not say. `none`:
    nothing; `space`: one space; `lines`: up to 32 spaces, tabs and line breaks, which a small model may fill."""

    tool_call_parser: str = option("auto", choice(("auto", "none", *ToolFormatName)))
    """How the model writes calls of tools, where requests have `tools`. `auto`: as its chat template shows; `none`:
    such requests are refused; otherwise a format of docs/tools.md."""
    reasoning_parser: str = option("auto", choice(("auto", "none", "think")))
    """`think`: what a chat answer has between `<think>` and `</think>` becomes its `reasoning_content`. `auto`: where
    the chat template knows these marks; `none`: it stays text."""

    low_effort_token_budget: int = option(1024, integer(0, 2**24))
    medium_effort_token_budget: int = option(4096, integer(0, 2**24))
    high_effort_token_budget: int = option(16384, integer(0, 2**24))
    """Tokens that a model may think with `reasoning_effort` low, medium and high."""

    join_identical: bool = option(False, boolean())
    """True: completions and conversations that have a seed or are greedy, and are the same as one of the same tenant,
    class and `cache_salt` that is computed at that moment, get its answer. False: each is computed, as those who
    measure a server with one request expect."""

    shared_answer_bytes: int = option(2**26, memory())
    """Bytes of memory for answers that are given to several: in flight, and computed ones of requests with an
    Idempotency-Key; or text such as "64MB". Beyond it, and what is asked for again later, is computed again."""

    request_log: str = option("memory", choice(("none", "memory", "disk")))
    """Where accepted requests are kept that have an Idempotency-Key or a stream that can be resumed: when they come
    again, they have the same answer. `none`: keys have no effect. `disk`: in files, which a restart reads again."""

    request_log_path: Path | None = option(None, path())
    """Folder for these files, of this server alone; they hold texts of requests. Relative to the folder the server was
    started in. Must be given with `disk`."""

    request_log_bytes: int = option(2**26, memory())
    """Bytes that these requests may have together, in memory and in files, or text such as "64MB"; the oldest make
    room."""

    request_log_age_s: float = option(86400.0, positive("seconds"))
    """Seconds for which an accepted request and its answer are kept."""

    resume_streams: bool = option(False, boolean())
    """True: events of streamed completions and conversations carry ids, from which a client goes on after a lost
    connection (`Last-Event-ID`)."""

    resume_grace_s: float = option(0.0, seconds())
    """Seconds for which such a stream is computed on when its client has left. 0: it ends, and is computed again for a
    client that comes back."""

    receipts: str = option("on_demand", choice(("none", "on_demand", "at_start")))
    """Receipts of answers (`receipt: true`): when the model's files are hashed. `on_demand`: for the first receipt,
    which waits for it. `at_start`: once the server has started. `none`: receipts are refused."""

    audit_every: int = option(100, integer(0))
    """Requests, of which one is computed again, alone, when the server is idle, and its answer compared. 0: never."""

    anonymous_highest_class: str | None = option(None, row_name())
    """Where no API keys are needed, requests of a better class, or with a priority before this class's rank, are
    refused with 403. None: no limit on a loopback address; on any other the class of priority 0."""
    cors_origins: tuple[str, ...] = option((), origins())
    """Origins such as https://chat.example.com whose pages may ask this server from a browser, `null` for pages of
    files, `*` for all. Empty: the server's own only."""

    allowed_hosts: tuple[str, ...] = option((), host_names())
    """Names besides `localhost` by which a server on a loopback address without API keys may be asked, such as that of
    a proxy before it; others are refused with 403."""

    ui: bool = option(True, boolean())
    """True: `/ui` is a page to try the model, to watch the scheduler and to see why a request waited. It is open to
    all; what it shows needs the key that is typed there."""

    max_live_viewers: int = option(16, integer(0, 1000))
    """Streams of `/v1/live` at a time, what the page's live view reads; a tenant has at most half of them. All of them
    together take at most one hundredth of a core: pictures become fewer as they cost more."""

    log_level: str = option("INFO", choice(LEVELS))
    """Least level of the log lines: DEBUG, INFO, WARNING or ERROR."""

    throughput_interval_s: float = option(10.0, seconds())
    """Seconds between two lines in the log that tell how busy the engines are; idle ones tell nothing. 0: no lines."""

    access_log: Path | None = option(None, path_or_dash())
    """File for one line of JSON a request (ids, tokens, times, no texts); relative to the folder the server was started
    in. `-`: standard output. None: nothing is written."""

    otlp_endpoint: str | None = option(None, url())
    """Address of a collector's traces, OTLP as JSON over HTTP, such as http://127.0.0.1:4318/v1/traces. Each request is
    a span there, its waiting and computing are spans within it; `traceparent` of W3C is honoured. None: no traces."""

    log_file_bytes: int = option(32 * 2**20, memory())
    """Bytes after which the access log, or the log of `llm-serving start`, goes on in a new file, or text such as
    "32MB"."""

    log_files: int = option(4, integer(2, 1000))
    """Files that are kept of each of these logs; the oldest is deleted."""

    @property
    def url(self) -> str:
        """Where the server can be asked."""
        host = f"[{self.server_ip}]" if ":" in self.server_ip else self.server_ip
        return f"{self.scheme}://{host}:{self.server_port}"

    @property
    def scheme(self) -> str:
        return "http" if self.ssl_certfile is None else "https"


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Section `pa_config`: the paged KV cache."""

    num_blocks: int | None = option(None, integer(1))
    """Blocks of each WorkAgent's KV cache. None: the WorkAgent chooses from the memory it may use."""

    block_size: int = option(16, integer(1, 1024))
    """Tokens of one block; a multiple of 16, except with `kernels: plain`."""

    num_swap_blocks: int = option(0, integer(0))
    """Blocks of each WorkAgent's host pool, where preempted requests wait when `preemption_mode` swaps. 0: none."""

    decode_seq_length: int | None = option(None, integer(1))
    """Tokens. Older files repeat `max_generate_length` here; it limits nothing, a smaller value earns a notice."""


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
    """Most requests of one tenant that run at once, at each WorkAgent; its others wait in nobody's way. A tenant is an
    API key, or the `user` a client names, or all who name none. None: no limit."""

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

    speculative_method: str = option("none", choice(("none", "ngram")))
    """Guesses of what comes next, checked beside the next token; they change no byte of an answer. `ngram`: what
    followed where the same tokens stood before, in the prompt, the answer so far and the tenant's finished answers.
    Requests whose guesses are mostly right get some, as long as more tokens come in the same time."""

    num_speculative_tokens: int = option(8, integer(1, 64))
    """Tokens guessed for a request at a time, at most; as many as its last block has room for."""

    prompt_lookup_tokens: int = option(3, integer(1, 16))
    """Tokens in a row that must have stood somewhere before, for `ngram`."""

    record_path: Path | None = option(None, path())
    """Folder where each scheduler's events and decisions are recorded, for `llm-serving replay`; token ids are among
    them. Relative to the folder the server was started in. None: nothing is recorded."""

    record_file_bytes: int = option(16 * 2**20, memory())
    """Bytes after which a file of a recording ends and the next begins, or text such as "16MB"."""

    record_files: int = option(4, integer(1, 10**6))
    """Files that are kept of each scheduler; the oldest is deleted."""


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Section `device_config`: the device and MindSpore's settings; a MindFormers `context` fills it."""

    device_target: str = option("CPU", choice(("CPU", "Ascend")))
    """`CPU` or `Ascend`."""

    num_threads: int | None = option(None, integer(1, 1024))
    """Threads of each WorkAgent's kernels. None: the cores divided by the number of WorkAgents."""

    max_device_memory: int | None = option(None, memory())
    """Bytes that weights and KV cache of one WorkAgent may take, or text such as "2GB" (one GB is 2**30 bytes)."""

    kernels: str = option("auto", choice(("auto", "program", "primitives", "plain", "plugin")))
    """What computes on a CPU. `program` (`plugin` in older files): one operator of our library runs the whole network.
    `primitives`: the graph that Ascend would run, answered by our library. `plain`: MindSpore's own operations, slower.
    `auto`: the first that works."""

    exactness: str = option("exact", choice(tuple(ExactnessName), {"paged": "exact", "flash": "fast"}))
    """What may be given up for speed, of the graph of primitives. `exact`: PagedAttention computes every step, on
    Ascend with batch-invariant products of `ms_custom_ops` where it is installed. `fast`: FlashAttentionScore computes
    steps of whole prompts; on Ascend its last bits may differ from those of PagedAttention, so that an answer depends
    on what its prompt shared a step with. The log tells at the start what is promised."""

    enable_graph_kernel: bool = option(False, boolean())
    """MindSpore's graph kernel fusion. Not on Ascend: infer boost, which PagedAttention needs there, excludes it."""

    graph_kernel_flags: str = option("", text())
    """Flags of the fusion, as MindSpore writes them: "--enable_parallel_fusion=true ..."."""

    save_graphs: bool = option(False, boolean())
    """Write the compiled graphs into `save_graphs_path`."""

    save_graphs_path: Path = option(Path("graph"), path())
    """Folder for the graphs; relative to the folder the server was started in."""

    jit_level: str = option("O0", choice(("O0", "O1", "O2")))
    """Optimisation level of MindSpore's graph compiler. O0, the only one on Ascend, runs kernel by kernel."""


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """Section `quant_config`: weights of fewer bits than `model_dtype` has."""

    quantization: str | None = option(None, choice(tuple(QuantizationName)))
    """How weights are kept and multiplied; they are rounded one by one while they are read. `w8a8`: weights of 8 bits
    with a scale for each output, times activations brought to 8 bits with a scale for each token. `w8a16`: the same
    weights, times activations as they are. `w4a16`: weights of 4 bits with a scale for each output and `group_size`
    inputs, the head in 8 bits. `w4a8`: the same weights, times activations brought to 8 bits, and the head as of
    `w8a8`. Norms, biases and tables that are only looked up stay in `model_dtype`. On a CPU with
    `kernels: program`. None: in `model_dtype`."""

    group_size: int = option(128, one_of((32, 64, 128)))
    """Inputs with one scale in weights of 4 bits; those whose rows it does not divide are kept in 8 bits."""

    @property
    def weights(self) -> Quantization | None:
        """How weights are kept."""
        return None if self.quantization is None else Quantization(QuantizationName(self.quantization), self.group_size)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Section `cluster_config`: the machines that WorkAgents run on."""

    engine: str = option(EngineName.LOCAL.value, choice(tuple(EngineName)))
    """Who starts WorkAgents. `local`: the master, on its own machine. `ray`: a Ray cluster (`pip install
    'llm-serving[ray]'`); steps then travel by TCP under TLS."""

    address: str | None = option(None, text())
    """Of the Ray cluster, as in "10.0.0.1:6379"; `auto` finds one that runs on this machine. None: the master starts
    Ray on its own machine, for itself."""

    replicas: int | None = option(None, integer(1, 4096))
    """WorkAgents, a replica of the model each. None: as many as `serving_config.agent_ports` has entries."""

    cpus_per_replica: int | None = option(None, integer(1, 4096))
    """Cores that a WorkAgent asks Ray for, and computes with unless `device_config.num_threads` says otherwise. None:
    `device_config.num_threads`, or this machine's cores shared between the replicas."""

    placement: str = option(SpreadName.SPREAD.value, choice(tuple(SpreadName)))
    """`spread`: WorkAgents on as many machines as there are. `pack`: on as few as will do."""

    master_host: str | None = option(None, text())
    """Address of this machine that WorkAgents connect to. None: the one Ray knows it by; where the master started Ray,
    127.0.0.1."""

    secret_file: Path | None = option(None, path())
    """File with the cluster's secret, at least 32 characters, at this path on every machine: who has it is let in, and
    nobody else. Must be given with `address`. None: the master makes one for as long as it lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One row of `api_keys`: a tenant, who shows a key."""

    name: str
    key_sha256: str
    """SHA-256 of the key, 64 hexadecimal digits; the key itself stands nowhere."""
    highest_class: str | None = None
    """Requests of a better class, or with a priority before this class's rank, are refused with 403. None: no limit."""
    max_waiting: int | None = None
    """Most of its requests that wait to be scheduled. None: only the other limits count."""
    max_running: int | None = None
    """Most of its requests that run at once, at each WorkAgent. None: `scheduler_config.max_running_per_tenant`."""
    admin: bool = False
    """Whether it sees and controls everybody's requests, not only its own."""
    max_requests_per_minute: int | None = None
    """Requests a minute, in bursts of as many; beyond, they are refused with 429. None: no limit."""
    max_tokens_per_minute: int | None = None
    """Tokens a minute, of prompts and of what may be generated; what is not generated is given back. None: no limit."""


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """The whole configuration, checked.

    Attributes:
        request_classes: By rank, at least one.
        api_keys: Who may ask; empty: everybody.
        sources: "section.key", or "section.row.key" -> where the value came from: "default", "file:line", "--set",
            "--model", "model config.json".
        notices: Sentences for the operator: keys without meaning, surprising combinations.
        hub_model: The model, where `model_path` was a name; perhaps its weights are still to be downloaded.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    serving: ServerConfig = field(default_factory=ServerConfig)
    pa: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    request_classes: tuple[RequestClass, ...] = DEFAULT_CLASSES
    api_keys: tuple[ApiKey, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    hub_model: HubModel | None = None

    @property
    def num_replicas(self) -> int:
        """WorkAgents."""
        return self.cluster.replicas or len(self.serving.agent_ports)


SECTIONS: Final[Mapping[str, tuple[str, type]]] = {
    "model_config": ("model", ModelConfig),
    "serving_config": ("serving", ServerConfig),
    "pa_config": ("pa", CacheConfig),
    "scheduler_config": ("scheduler", SchedulerConfig),
    "device_config": ("device", DeviceConfig),
    "quant_config": ("quant", QuantConfig),
    "cluster_config": ("cluster", ClusterConfig),
}
"""YAML section -> attribute of `ServingConfig`, dataclass."""


@dataclass(frozen=True)
class Table:
    """A section of named rows.

    Attributes:
        row_type: Dataclass of a row; its `name` is the key the row stands under.
        rules: Key of a row -> its rule. A key without a default in `row_type` must be given.
        default: The rows when the section is left out.
    """

    row_type: type
    rules: Mapping[str, Rule]
    default: tuple[Any, ...] = ()


ROW_NAME: Final = row_name()
TABLES: Final[Mapping[str, Table]] = {
    "request_classes": Table(
        RequestClass,
        {
            "rank": integer(-MAX_PRIORITY, MAX_PRIORITY),
            "weight": integer(1, 10**6),
            "ageing_steps": integer(1, 10**9),
            "ttft_slo_s": positive("seconds"),
            "tpot_slo_s": positive("seconds"),
            "max_waiting": integer(1, 10**6),
            "max_running_share": share(),
            "max_kv_share": share(),
        },
        DEFAULT_CLASSES,
    ),
    "api_keys": Table(
        ApiKey,
        {
            "key_sha256": sha256(),
            "highest_class": ROW_NAME,
            "max_waiting": integer(1, 10**6),
            "max_running": integer(1, 10**6),
            "admin": boolean(),
            "max_requests_per_minute": integer(1, 10**9),
            "max_tokens_per_minute": integer(1, 10**12),
        },
    ),
}
"""YAML section, which is also the attribute of `ServingConfig` -> what its rows hold."""
