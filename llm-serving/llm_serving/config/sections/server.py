"""Section `serving_config`: its keys and their checks."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llm_serving.config.paths import Kind
from llm_serving.config.rules import (
    BOOLEAN,
    HOST_NAMES,
    MEMORY,
    ORIGINS,
    PATH_OR_DASH,
    PROXIES,
    ROW_NAME,
    SECONDS,
    TEXT,
    TIMEOUT,
    URL,
    choice,
    integer,
    integers,
    option,
    path,
    positive,
)
from llm_serving.config.values import Values
from llm_serving.core.enums import (
    JsonWhitespaceName,
    ReasoningFormatName,
    RoutingName,
    SpecialTokensName,
    ToolFormatName,
)
from llm_serving.core.files import read_regular
from llm_serving.errors import ConfigError, ModelError
from llm_serving.log import LEVELS

CERTFILE: Final = "serving_config.ssl_certfile"
KEYFILE: Final = "serving_config.ssl_keyfile"
PASSWORD_FILE: Final = "serving_config.ssl_keyfile_password_file"  # noqa: S105
MAX_FILE_BYTES: Final = 2**20
MAX_PASSWORD_BYTES: Final = 1023


def tls_context(certfile: Path, keyfile: Path | None, password_file: Path | None = None) -> ssl.SSLContext:
    """Return the TLS context of the server, for TLS 1.2 or newer. If a file cannot be used, raise ConfigError, which
    names the file and its YAML key.
    """
    _read_tls_file(CERTFILE, certfile)
    key_name, key_path = (KEYFILE, keyfile) if keyfile is not None else (CERTFILE, certfile)
    is_encrypted = b"ENCRYPTED" in _read_tls_file(key_name, key_path)
    if is_encrypted and password_file is None:
        raise ConfigError(
            f"{key_name}: {key_path}: the private key is encrypted, so {PASSWORD_FILE} must name its password file"
        )
    password = b"" if password_file is None else _read_password(password_file)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(certfile)
    except (ssl.SSLError, OSError):
        raise ConfigError(f"{CERTFILE}: {certfile}: must hold a certificate in PEM form") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Never None: without a password, OpenSSL would prompt for one on the terminal.
        context.load_cert_chain(certfile, keyfile, password=lambda: password)
    except (ssl.SSLError, OSError) as error:
        if is_encrypted:
            raise ConfigError(f"{PASSWORD_FILE}: {password_file}: must hold the password of {key_path}") from None
        mismatch = getattr(error, "reason", None) == "KEY_VALUES_MISMATCH"
        rule = f"is not the key of the certificate {certfile}" if mismatch else "must hold a private key in PEM form"
        raise ConfigError(f"{key_name}: {key_path}: {rule}") from None
    return context


def _read_tls_file(name: str, path: Path) -> bytes:
    try:
        return read_regular(path, MAX_FILE_BYTES)
    except ModelError as error:
        raise ConfigError(f"{name}: {error}") from None


def _read_password(path: Path) -> bytes:
    password = _read_tls_file(PASSWORD_FILE, path).partition(b"\n")[0].removesuffix(b"\r")
    if not 0 < len(password) <= MAX_PASSWORD_BYTES:
        rule = f"the first line must be a password of at most {MAX_PASSWORD_BYTES} bytes"
        raise ConfigError(f"{PASSWORD_FILE}: {path}: {rule}")
    return password


REQUEST_LOG: Final = "serving_config.request_log"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Section `serving_config`: the HTTP server, its limits, and the WorkAgents."""

    server_ip: str = option("127.0.0.1", TEXT)
    """Address that the HTTP server listens on. 0.0.0.0: all network interfaces."""
    server_port: int = option(8835, integer(0, 65535))
    """Port of the HTTP server. 0: any free port."""
    agent_ports: tuple[int, ...] = option((16002,), integers(1, 65535, unique=True))
    """One replica of the model for each entry. Only their number matters: no connection uses these ports."""
    start_device_id: int = option(0, integer(0, 1023))
    """Device number of the first WorkAgent. The others use the following numbers."""
    ssl_certfile: Path | None = option(None, path(Kind.FILE))
    """PEM file with the certificate and its chain; enables HTTPS. A changed file is loaded within seconds. null: plain
    HTTP."""
    ssl_keyfile: Path | None = option(None, path(Kind.FILE), only_with=(CERTFILE, ...))
    """PEM file with the private key of the certificate. null: the key is in `ssl_certfile`."""
    ssl_keyfile_password_file: Path | None = option(None, path(Kind.FILE), only_with=(CERTFILE, ...))
    """File whose first line is the password of an encrypted private key. null: the key is not encrypted."""
    allowed_hosts: tuple[str, ...] = option((), HOST_NAMES)
    """Host names, besides `localhost`, that requests to a loopback address without API keys may use, such as the name
    of a reverse proxy. Requests with another Host header are refused with 403."""
    trusted_proxies: tuple[str, ...] = option(("127.0.0.1", "::1"), PROXIES)
    """Addresses and networks (such as 10.0.1.0/24) of reverse proxies whose `X-Forwarded-For` and `X-Forwarded-Proto`
    headers the server believes. `*`: every client, which lets a client claim any address. []: none."""
    cors_origins: tuple[str, ...] = option((), ORIGINS)
    """Origins, such as https://chat.example.com, whose web pages may send requests to this server from a browser.
    `null`: pages of local files. `*`: all. []: only the server's own page."""
    anonymous_highest_class: str | None = option(None, ROW_NAME, reloadable=True)
    """Without API keys: the highest request class that clients may use; a higher one, or a priority before it, gets
    403. null: no limit on a loopback address; the class of priority 0 on any other."""
    ui: bool = option(True, BOOLEAN)
    """True: a public web page at `/ui` to try the model, watch the scheduler and explain waiting times. Its data
    requires an API key where there are keys."""
    max_connections: int = option(1024, integer(1, 10**6), reloadable=True)
    """Maximum number of client connections, TLS handshakes included. At the limit an idle connection is closed for a
    new one; if none is idle, the new one gets 503."""
    max_request_body_bytes: int = option(4 * 2**20, integer(1024, 2**30), reloadable=True)
    """Maximum size of a request body in bytes. A longer body is refused with 413 while it is received."""
    max_timeout_s: float = option(86400.0, TIMEOUT, reloadable=True)
    """Maximum of the `timeout_s` that a request may set, in seconds, after which it ends with an error."""
    shutdown_timeout_s: float = option(30.0, SECONDS)
    """Seconds that running requests have to finish when the server stops. The remaining ones are aborted."""
    routing: str = option(RoutingName.PREDICTED_TTFT.value, choice(tuple(RoutingName)))
    """How a request is assigned to one of several replicas; responses do not depend on it. `predicted_ttft`: lowest
    predicted time to first token, from queue, measured steps and cached prefix. `prefix_affinity`: longest cached
    prefix, while no replica has many more requests than another. `block_cost`: fewest blocks to compute and hold.
    `least_loaded`: fewest requests. `round_robin`: all replicas in turn."""
    exit_without_work_agents: bool = option(False, BOOLEAN)
    """True: the server exits with code 3 when all its WorkAgents have exhausted `max_worker_restarts`, for a process
    supervisor. False: it keeps restarting them."""
    tool_call_parser: str = option("auto", choice(("auto", "none", *ToolFormatName)))
    """Format in which the model writes tool calls (docs/guides/tools.md). `auto`: the format of its chat template.
    `none`: requests with `tools` are refused with 400."""
    reasoning_parser: str = option("auto", choice(("auto", "none", *ReasoningFormatName)))
    """Format in which the model writes its reasoning (docs/guides/tools.md), which becomes `reasoning_content` of a
    chat response. `think`: between `<think>` and `</think>`. `auto`: as in its chat template. `none`: it stays part of
    the text."""
    batch_path: Path | None = option(None, path(Kind.MADE_FILE))
    """SQLite file for the Batch API: uploaded files, batches and their results. Relative to the working folder of the
    server. null: no Batch API."""
    batch_store_bytes: int = option(2**30, MEMORY)
    """Maximum size of all files of the Batch API together, and as much again for the inputs of unfinished batches:
    bytes, or text such as "1GB". Beyond it, uploads are refused. With several API keys, the files of one key may take
    at most as many bytes as remain free."""
    log_level: str = option("INFO", choice(LEVELS))
    """Minimum level of log lines."""
    access_log: Path | None = option(None, PATH_OR_DASH)
    """File for the access log: one JSON line for each request with ids, token counts and times, without texts. Relative
    to the working folder of the server. `-`: standard output. null: no access log."""
    otlp_endpoint: str | None = option(None, URL)
    """URL of a trace collector for OTLP as JSON over HTTP, such as http://127.0.0.1:4318/v1/traces. A request is a span
    with child spans for waiting and computing, in the trace of its header `traceparent`. null: no traces."""
    throughput_interval_s: float = option(10.0, SECONDS)
    """Seconds between two log lines with the throughput of the engines; idle engines are not logged. 0: no lines."""
    max_connections_per_address: int = option(512, integer(1, 10**6), expert=True, reloadable=True)
    """Maximum number of connections of one client address, also a reverse proxy's, or of one /64 network with IPv6."""
    max_url_bytes: int = option(8192, integer(256, 65535), expert=True, reloadable=True)
    """Maximum length of a URL in bytes; less than `max_header_bytes`. A longer one is refused with 414."""
    max_header_bytes: int = option(32 * 1024, integer(1024, 2**20), expert=True, reloadable=True)
    """Maximum bytes of the request line and headers, or of the framing of a chunked body; more is refused with 431."""
    max_headers: int = option(100, integer(8, 10**4), expert=True, reloadable=True)
    """Maximum number of headers of a request. More are refused with 431."""
    max_pipelined_bytes: int = option(32 * 1024, integer(0, 2**30), expert=True, reloadable=True)
    """Maximum number of bytes of pipelined requests that the server reads while the connection waits for a response."""
    max_buffered_bytes: int = option(32 * 2**20, integer(1024, 2**40), derived=True, expert=True, reloadable=True)
    """Maximum number of bytes that the server buffers for all connections: incomplete requests, and responses that
    clients have not read. At the limit the connection with the largest buffer is closed, or gets 503. At least twice
    `max_request_body_bytes`. null: 32 MiB, or more for larger bodies."""
    max_buffered_response_bytes: int = option(2**28, MEMORY, expert=True, reloadable=True)
    """Memory for all incomplete non-streaming responses, log-probabilities included: bytes, or text such as "256MB". At
    the limit the largest response of the tenant that uses most gets 503, or 400 if it is too large alone."""
    header_timeout_s: float = option(10.0, TIMEOUT, expert=True, reloadable=True)
    """Seconds for the TLS handshake, and for the headers of a request after the connection or the first byte, else
    408."""
    body_timeout_s: float = option(60.0, TIMEOUT, expert=True, reloadable=True)
    """Seconds in which the body of a request must arrive after its headers, else 408."""
    idle_timeout_s: float = option(30.0, TIMEOUT, expert=True)
    """Seconds after which a connection without a request is closed. The time until a response does not count."""
    write_timeout_s: float = option(60.0, TIMEOUT, expert=True, reloadable=True)
    """Seconds in which a client must read 16 KiB of its response, or all of it; otherwise the connection is closed."""
    step_timeout_s: float = option(300.0, SECONDS, expert=True)
    """Maximum duration of one step in seconds. A WorkAgent that exceeds it is restarted."""
    load_timeout_s: float = option(1800.0, TIMEOUT, expert=True)
    """Seconds without a report of progress after which a loading WorkAgent is restarted. The whole load may take any
    time."""
    max_worker_restarts: int = option(5, integer(0, 1000), expert=True)
    """Restarts in a row without a completed step after which `/health` reports that the WorkAgent may not come back.
    Restarts continue with pauses of up to 5 s."""
    restart_wait_s: float = option(300.0, SECONDS, expert=True)
    """Seconds that requests wait for the restart of their WorkAgent before they end with an error. After a failed
    restart, new requests get 503 until the WorkAgent is ready."""
    explain_requests: int = option(1000, integer(0, 10**6), expert=True)
    """Number of latest finished requests of each WorkAgent that `/v1/requests/{id}/explain` covers, besides all
    unfinished ones. 0: no explanations and no timeline."""
    timeline_steps: int = option(10000, integer(1, 10**7), expert=True)
    """Number of latest steps of each WorkAgent that explanations and `/v1/timeline` cover."""
    response_store_bytes: int = option(2**26, integer(0, 2**40), expert=True)
    """Memory in bytes for stored responses of `/v1/responses`, and as much again for those in progress in the
    background. At the limit the oldest response of the API key that uses most is deleted. 0: none is stored."""
    batch_concurrency: int | None = option(None, integer(1, 4096), expert=True)
    """Number of requests of the Batch API that run at once. null: `model_config.decode_batch_size`."""
    max_grammar_bytes: int = option(2**16, integer(1024, 2**24), expert=True)
    """Maximum bytes of a JSON schema, regular expression or grammar. A larger one is refused with 400."""
    max_grammar_states: int = option(20_000, integer(100, 10**7), expert=True)
    """Maximum number of automaton states, about 2 KB each, of a response's grammar. At the limit it ends with an
    error."""
    grammar_cache_size: int = option(64, integer(1, 10**5), expert=True)
    """Number of compiled grammars that are cached. The least recently used is evicted."""
    special_tokens_in_content: str = option(SpecialTokensName.CONTROL.value, choice(tuple(SpecialTokensName)))
    """Meaning of a special token such as `<|im_end|>` in the content of a message. `control`: a control token, with
    which a user can end a message or begin one of another role. `text`: plain characters, for untrusted text."""
    json_whitespace: str = option(JsonWhitespaceName.SPACE.value, choice(tuple(JsonWhitespaceName)), expert=True)
    """White space in structured JSON output where the request does not set it. `none`: none. `space`: one space.
    `lines`: up to 32 spaces, tabs and line breaks."""
    low_effort_token_budget: int = option(1024, integer(0, 2**24), expert=True)
    """Reasoning budget in tokens of requests with `reasoning_effort: low`; then the response follows."""
    medium_effort_token_budget: int = option(4096, integer(0, 2**24), expert=True)
    """Reasoning budget in tokens of requests with `reasoning_effort: medium`."""
    high_effort_token_budget: int = option(16384, integer(0, 2**24), expert=True)
    """Reasoning budget in tokens of requests with `reasoning_effort: high`."""
    coalesce_identical_requests: bool = option(False, BOOLEAN, expert=True)
    """True: a request with a seed or greedy sampling gets the response of an identical request of the same tenant,
    class and `cache_salt` that is being computed."""
    coalesced_response_bytes: int = option(2**26, MEMORY, expert=True)
    """Memory for responses that several requests may get (in flight, or kept for an Idempotency-Key): bytes, or text
    such as "64MB". Beyond it, a repeated request is computed again."""
    request_log: str = option("memory", choice(("none", "memory", "disk")), expert=True)
    """Where requests with an Idempotency-Key or a resumable stream are recorded, so that repeated ones get the same
    response. `none`: nowhere; an Idempotency-Key has no effect. `memory`: until the server stops. `disk`: in files that
    a restarted server reads."""
    request_log_path: Path | None = option(None, path(Kind.MADE_FOLDER), expert=True)
    """Folder for `request_log: disk`, of one server only; it contains texts of requests. Relative to the working folder
    of the server."""
    request_log_bytes: int = option(2**26, MEMORY, expert=True)
    """Maximum size of the recorded requests: bytes, or text such as "64MB". At the limit the oldest one is deleted;
    with `memory`, the oldest one of the API key that uses most."""
    request_log_age_s: float = option(86400.0, positive("seconds"), expert=True)
    """Seconds for which a recorded request and its response are kept."""
    resume_streams: bool = option(False, BOOLEAN, expert=True)
    """True: events of streamed completions have ids, with which a client resumes the stream: `Last-Event-ID`."""
    resume_grace_s: float = option(0.0, SECONDS, expert=True)
    """Seconds for which a resumable stream is computed without its client. 0: it is aborted, and computed again if
    resumed."""
    receipts: str = option("on_demand", choice(("none", "on_demand", "at_start")), expert=True)
    """When the server hashes the files of the model for receipts (`receipt: true`). `on_demand`: for the first receipt,
    whose response waits. `at_start`: as soon as the server starts. `none`: requests for receipts are refused."""
    audit_every: int = option(100, integer(0), expert=True)
    """One of this many requests is audited: computed again, alone, while the server is idle, and compared. 0: none."""
    max_live_viewers: int = option(16, integer(0, 1000), expert=True)
    """Maximum number of streams of `/v1/live`, which the web page reads, half of them of one tenant. All together use
    at most 1 % of a core: updates become less frequent when they cost more. 0: none."""
    log_file_bytes: int = option(32 * 2**20, MEMORY, expert=True)
    """Size in bytes, or as "32MB", at which the access log or the log of `llm-serving start` continues in a new
    file."""
    log_files: int = option(4, integer(2, 1000), expert=True)
    """Maximum number of files of the access log and of the log of `llm-serving start`. The oldest is deleted."""

    @property
    def url(self) -> str:
        host = f"[{self.server_ip}]" if ":" in self.server_ip else self.server_ip
        return f"{self.scheme}://{host}:{self.server_port}"

    @property
    def scheme(self) -> str:
        return "http" if self.ssl_certfile is None else "https"


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable only from this machine. `localhost` is the only name that counts."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_server(values: Values) -> None:
    name, body = "serving_config.max_buffered_bytes", values["serving_config.max_request_body_bytes"]
    if values[name] < 2 * body:
        if values.is_given(name):
            rule = f"must be at least twice max_request_body_bytes {body}, or two bodies would exceed it"
            raise values.error(name, rule)
        values.set(name, 2 * body, "twice max_request_body_bytes")
    _check_certificate(values)
    name, headers = "serving_config.max_url_bytes", values["serving_config.max_header_bytes"]
    if values[name] >= headers:
        raise values.error(name, f"must be less than max_header_bytes {headers}, which includes the URL")
    if values[REQUEST_LOG] == "disk" and values["serving_config.request_log_path"] is None:
        raise values.error("serving_config.request_log_path", "must be given with request_log: disk")
    if values[REQUEST_LOG] == "none":
        condition = "with request_log: none, because a stream resumes from this record"
        values.require("serving_config.resume_streams", (False,), condition)


def _check_certificate(values: Values) -> None:
    if values[CERTFILE] is None:
        return
    try:
        tls_context(values[CERTFILE], values[KEYFILE], values[PASSWORD_FILE])
    except ConfigError as error:
        name = str(error).partition(": ")[0]
        raise ConfigError(f"{values.source(name)}: {error}") from None
