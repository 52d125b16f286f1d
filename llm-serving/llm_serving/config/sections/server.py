"""Section `serving_config`."""

from dataclasses import dataclass
from pathlib import Path

from llm_serving.config.kinds import Kind
from llm_serving.config.rules import (
    boolean,
    choice,
    host_names,
    integer,
    integers,
    memory,
    option,
    origins,
    path,
    path_or_dash,
    patience,
    positive,
    proxies,
    row_name,
    seconds,
    text,
    url,
)
from llm_serving.core.enums import JsonWhitespaceName, RoutingName, ToolFormatName
from llm_serving.log import LEVELS


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

    ssl_certfile: Path | None = option(None, path(Kind.FILE))
    """PEM file of the certificate, with those that lead to its authority; makes it HTTPS. None: HTTP. Files that change
    are read again within seconds, without a restart."""

    ssl_keyfile: Path | None = option(None, path(Kind.FILE))
    """PEM file of the certificate's private key. None: it is in `ssl_certfile`."""

    ssl_keyfile_password_file: Path | None = option(None, path(Kind.FILE))
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

    whole_answer_bytes: int = option(2**28, memory())
    """Bytes of memory, or text such as "256MB", that answers in one piece (without `stream: true`) may hold together
    until each is complete, with all that they tell of their tokens. Beyond, the largest one ends of whoever holds most:
    with 503, or with 400 where it alone is too large."""

    header_timeout_s: float = option(10.0, patience())
    """Seconds from a connection, or the first byte of a request, to the end of its headers (408); and for TLS's
    handshake."""

    body_timeout_s: float = option(60.0, patience())
    """Seconds from the headers of a request to the end of its body (408)."""

    idle_timeout_s: float = option(30.0, patience())
    """Seconds between two requests of a connection, then it is closed. An answer may take any time."""

    write_timeout_s: float = option(60.0, patience())
    """Seconds in which a client must take 16 KiB of what was written to it, or all of it; else its connection is cut,
    its request aborted."""

    shutdown_timeout_s: float = option(30.0, seconds())
    """Seconds that running requests get to finish when the server is told to stop."""

    max_timeout_s: float = option(86400.0, patience())
    """Seconds. Most that a request may give itself (`timeout_s`) until it ends with an error."""

    step_timeout_s: float = option(300.0, seconds())
    """Seconds. A WorkAgent that takes longer for one step counts as dead and is started again."""

    load_timeout_s: float = option(1800.0, patience())
    """Seconds in which a WorkAgent that loads must have got on: it tells when it begins with something else, and every
    few seconds what it has read of the weights. One that says nothing for so long is ended and started again. The
    whole may take any time."""

    max_worker_restarts: int = option(5, integer(0, 1000))
    """Times in a row, without a step in between, that a WorkAgent which ended is started again before `/health` says
    that it may be gone for good. It is tried on all the same, with pauses of up to 5 s."""

    exit_without_work_agents: bool = option(False, boolean())
    """True: the server ends with exit code 3 when all its WorkAgents have used up `max_worker_restarts`."""

    restart_wait_s: float = option(300.0, seconds())
    """Seconds that requests wait for their WorkAgent to be started again; then they end with an error. Once a restart
    has failed, new requests are refused (503) until it is back."""

    routing: str = option(RoutingName.PREDICTED_TTFT, choice(tuple(RoutingName)))
    """Which of several replicas gets a request; the answer is the same. `predicted_ttft`: where its first token is
    expected first, by the queue, the steps measured and what is cached of its prompt there. `prefix_affinity`: where
    most of its prompt is cached, while no replica has many more requests than another. `block_cost`: where fewest
    blocks are to be computed and held. `least_loaded`: where the fewest requests are. `round_robin`: one after the
    other."""

    explain_requests: int = option(1000, integer(0, 10**6))
    """Requests of each WorkAgent that ended, the newest, which `/v1/requests/{id}/explain` can still explain, beside
    all that live. 0: none, and no timeline."""

    timeline_steps: int = option(10000, integer(1, 10**7))
    """Steps of each WorkAgent, the newest, that explanations and `/v1/timeline` are made from."""

    response_store_bytes: int = option(2**26, integer(0, 2**40))
    """Bytes of memory for responses of /v1/responses that can be asked for and gone on with, and as much again for
    those in progress in the background; the oldest make room, of several API keys those of the one that has most. 0:
    none is kept."""

    batch_path: Path | None = option(None, path(Kind.MADE_FILE))
    """SQLite file for uploaded files, batches and their answers; relative to the folder the server was started in.
    None: there are no batches."""

    batch_store_bytes: int = option(2**30, memory())
    """Bytes that all files of batches may have together, and apart from them the inputs of batches that have not ended;
    or text such as "1GB". Of several API keys each has at most as much as it leaves free."""

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

    request_log_path: Path | None = option(None, path(Kind.MADE_FOLDER))
    """Folder for these files, of this server alone; they hold texts of requests. Relative to the folder the server was
    started in. Must be given with `disk`."""

    request_log_bytes: int = option(2**26, memory())
    """Bytes that these requests may have together, in memory and in files, or text such as "64MB"; the oldest make
    room, in memory and of several API keys those of the one that has most."""

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

    trusted_proxies: tuple[str, ...] = option(("127.0.0.1", "::1"), proxies())
    """Addresses, or networks such as 10.0.1.0/24, of proxies that are believed: whose client asks (`X-Forwarded-For`),
    over what (`X-Forwarded-Proto`). `*`: everybody is, so that each client may claim any address."""

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
