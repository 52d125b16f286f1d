"""Fields of requests that are not served: the table of what is refused and what is ignored, a protocol at a time.

What is served stands in the structs of the bodies, and what a sampling parameter may be in `core.sampling_params`.
Everything else is decided here: a field that might change an answer is refused by name, one that cannot is ignored and
named in the header `x-ignored-parameters` of the answer. A field that nobody has heard of might change an answer, so it
is refused, as by OpenAI itself: a misspelt `temprature` must not pass for the default. Only the older routes, whose
clients never were refused one, name it in the header. A field that is null asks for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestError, shorten
from llm_serving.server.anthropic_schemas import (
    AnthropicTool,
    ContentBlock,
    ConversationTurn,
    CountTokensRequest,
    MessagesRequest,
    OutputConfig,
    ResultBlock,
    Thinking,
    ToolChoice,
)
from llm_serving.server.batches.schemas import BatchRequest
from llm_serving.server.repeated_names import repeated_name, repeated_name_within
from llm_serving.server.request_body import malformed, read_as
from llm_serving.server.responses_schemas import FunctionTool, InputItem, InputPart, Reasoning, ResponsesRequest
from llm_serving.server.schemas import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    ContentPart,
    DetokenizeRequest,
    Function,
    FunctionOfMessage,
    PriorityRequest,
    StreamOptions,
    TokenizeRequest,
    Tool,
    ToolCallOfMessage,
)
from llm_serving.server.text_schemas import LegacyParameters, LegacyRequest, TGIParameters, TGIRequest
from llm_serving.server.vector_schemas import EmbeddingsRequest, RerankRequest, ScoreRequest, TextDocument

T = TypeVar("T")

IGNORED_HEADER: Final = "x-ignored-parameters"
MAX_NAMED: Final = 20
"""Most fields that a header names."""
MAX_NEUTRAL_BYTES: Final = 64
"""A longer value asks for something."""
MAX_NAME_CHARS: Final = 60


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that would change the answer."""

    why: str = "is not supported"
    neutral: tuple[Any, ...] = ("", 0, False)
    """Values that ask for nothing, besides null and what is empty."""
    empty_asks: bool = False
    """Whether what is empty asks for something: an object that only has options."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """A field that cannot change the answer."""

    why: str


Rows = Mapping[str, Refused | Ignored]


@dataclass(frozen=True, slots=True)
class BodyFields:
    """What the fields of one body mean that its struct does not have."""

    rows: Rows = field(default_factory=dict)
    unknown: Refused | Ignored = Refused("is not a parameter of this route", ())
    nested: Mapping[str, type] = field(default_factory=dict)
    """Field -> struct of the object, or of the objects in the list, that it holds."""


_IN_ORDER: Final = Ignored("calls come in their order")
_STRICT: Final = ()
"""Every value but null asks for something."""
_TOOLS: Final = Refused("is not supported: tools are not served")
_ADAPTER: Final = Refused("is not supported: one model without adapters is served")


def _named(here: str) -> Refused:
    """A name of another protocol."""
    return Refused(f"is not a parameter of this route; `{here}` is", _STRICT)


_OPENAI: Final[Rows] = {
    "structural_tag": Refused("is not supported; `tools` are, and a grammar may describe any text"),
    "grammar": _named("ebnf"),
    "logits_processors": Refused(),
    "lora_request": _ADAPTER,
    "lora_path": _ADAPTER,
    "adapter_id": _ADAPTER,
    "documents": Refused("is not supported: put documents into `messages`"),
    "no_repeat_ngram_size": Refused(),
    "typical_p": Refused(neutral=(1,)),
    "spaces_between_special_tokens": Refused(neutral=(True,)),
    "do_sample": Refused("must be true; `temperature: 0` takes the most likely tokens", (True,)),
    "max_new_tokens": _named("max_tokens"),
    "min_new_tokens": _named("min_tokens"),
    "stop_sequences": _named("stop"),
    "truncate": _named("truncate_prompt_tokens"),
    "top_n_tokens": _named("logprobs"),
    "modalities": Refused("must be text alone", (["text"],)),
    "audio": Refused("is not supported: only text is"),
    "verbosity": Refused(neutral=("medium",)),
    "kv_transfer_params": Refused(),
    "guided_decoding_backend": Ignored("there is one"),
    "prediction": Ignored("only a hint for speed"),
    "store": Ignored("nothing is stored"),
    "metadata": Ignored("only matters to what is stored"),
    "service_tier": Ignored("`priority` and `priority_class` say who goes first"),
    "safety_identifier": Ignored("only names who asks"),
    "prompt_cache_key": Ignored("only a hint for speed"),
    "prompt_cache_retention": Ignored("only a hint for speed"),
    "cache_prompt": Ignored("only a hint for speed"),
    "keep_alive": Ignored("the model stays loaded"),
}  # fmt: skip

_TGI: Final[Rows] = {
    "best_of": Refused(neutral=(1,)),
    "typical_p": Refused(neutral=(1,)),
    "watermark": Refused(),
    "decoder_input_details": Refused(),
    "adapter_id": _ADAPTER,
    "max_tokens": _named("max_new_tokens"),
    "min_tokens": _named("min_new_tokens"),
    "truncate_prompt_tokens": _named("truncate"),
}
_LEGACY_IGNORED: Final[Rows] = dict.fromkeys(
    ("details", "decoder_input_details", "top_n_tokens", "truncate", "typical_p", "watermark"),
    Ignored("never had an effect on these routes"),
)
_NOT_COUNTED: Final[Rows] = {
    "output_format": _named("output_config.format"),
    "mcp_servers": Refused(),
    "container": Refused(),
    "context_management": Refused(),
    "cache_control": Ignored("only a hint for speed"),
}
_ANTHROPIC: Final[Rows] = {
    **_NOT_COUNTED,
    "metadata": Ignored("`user` names the tenant"),
    "service_tier": Ignored("`priority` and `priority_class` say who goes first"),
    "inference_geo": Ignored("there is one place"),
    "stop": _named("stop_sequences"),
    "max_completion_tokens": _named("max_tokens"),
}
_BLOCK: Final[Rows] = {
    "cache_control": Ignored("only a hint for speed"),
    "citations": Refused(),
    **dict.fromkeys(("source", "title", "context"), Refused("is not supported: only text is")),
    **dict.fromkeys(("signature", "data"), Ignored("only tells of an answer that comes back")),
    "is_error": Ignored("the content tells of an error"),
    "caller": Ignored("only tells of an answer that comes back"),
}
_ANTHROPIC_TOOL: Final[Rows] = {
    "cache_control": Ignored("only a hint for speed"),
    "eager_input_streaming": Ignored("arguments are always told as they are written"),
    **dict.fromkeys(("allowed_callers", "defer_loading", "input_examples"), Refused()),
}
_OF_ANTHROPIC: Final = {
    "messages": ConversationTurn,
    "system": ContentBlock,
    "tools": AnthropicTool,
    "tool_choice": ToolChoice,
    "output_config": OutputConfig,
    "thinking": Thinking,
}
_RESPONSES: Final[Rows] = {
    "max_tool_calls": Refused("is not supported: it bounds tools of a server, and this one has none"),
    "truncation": Refused("must be disabled: nothing is left out of a conversation", ("disabled",)),
    "include": Refused("is not supported: a response tells all there is"),
    "prompt": Refused("is not supported: no templates are kept"),
    "conversation": Refused("is not supported; `previous_response_id` goes on with a response"),
    "context_management": Refused(),
    "top_logprobs": Refused(),
    "max_tokens": _named("max_output_tokens"),
    "messages": _named("input"),
    "stream_options": Ignored("events hide nothing"),
    "service_tier": Ignored("`priority` and `priority_class` say who goes first"),
    "safety_identifier": Ignored("only names who asks"),
    "prompt_cache_key": Ignored("only a hint for speed"),
    "prompt_cache_retention": Ignored("only a hint for speed"),
}
_ITEM: Final[Rows] = {
    **dict.fromkeys(("id", "status"), Ignored("only tells of an answer that comes back")),
    "encrypted_content": Refused("is not supported: nothing is encrypted"),
    "phase": Ignored("only tells of an answer that comes back"),
}
_PART: Final[Rows] = {
    **dict.fromkeys(("annotations", "logprobs"), Ignored("only tells of an answer that comes back")),
    **dict.fromkeys(("image_url", "file_id", "file_data", "refusal"), Refused("is not supported: only text is")),
}
_VECTORS: Final[Rows] = {
    "max_tokens": Refused("is not a parameter of this route; `truncate_prompt_tokens` is", _STRICT),
    "messages": Refused("is not supported: put texts into the fields of this route"),
    "instruction": Refused("is not supported: put it into the text"),
    "chat_template": Refused(),
    "mm_processor_kwargs": Refused("is not supported: only text is"),
    "service_tier": Ignored("`priority` and `priority_class` say who goes first"),
}
_OLDER: Final = Ignored("these routes never refused a field")

BODIES: Final[Mapping[type, BodyFields]] = {
    CompletionRequest: BodyFields(
        {
            **_OPENAI,
            **dict.fromkeys(("tools", "functions"), _TOOLS),
            **dict.fromkeys(("tool_choice", "function_call"), Refused(_TOOLS.why, ("none", "auto"))),
            "parallel_tool_calls": Ignored("only matters to tools"),
            "suffix": Refused(),
        },
        nested={"stream_options": StreamOptions},
    ),
    ChatCompletionRequest: BodyFields(
        {
            **_OPENAI,
            "functions": _named("tools"),
            "function_call": Refused("is not a parameter of this route; `tool_choice` is", ("none", "auto")),
            "chat_template": Refused(),
            "web_search_options": Refused("is not supported: this server searches nothing", empty_asks=True),
        },
        nested={"messages": ChatMessage, "tools": Tool, "stream_options": StreamOptions},
    ),
    StreamOptions: BodyFields({"include_obfuscation": Ignored("pieces are as long as what they say")}),
    Tool: BodyFields(nested={"function": Function}),
    Function: BodyFields(),
    ToolCallOfMessage: BodyFields({"index": _IN_ORDER}, nested={"function": FunctionOfMessage}),
    FunctionOfMessage: BodyFields(),
    ChatMessage: BodyFields(
        {
            "function_call": _named("tool_calls"),
            "audio": Refused(),
            "refusal": Refused(),
            "annotations": Refused(),
        },
        nested={"tool_calls": ToolCallOfMessage, "content": ContentPart},
    ),
    ContentPart: BodyFields(
        {
            "cache_control": Ignored("only a hint for speed"),
            **dict.fromkeys(
                ("image_url", "input_audio", "audio_url", "video_url", "file", "refusal"),
                Refused("is not supported: only text is"),
            ),
        }
    ),
    MessagesRequest: BodyFields(_ANTHROPIC, nested=_OF_ANTHROPIC),
    CountTokensRequest: BodyFields(_NOT_COUNTED, nested=_OF_ANTHROPIC),
    ConversationTurn: BodyFields(nested={"content": ContentBlock}),
    ContentBlock: BodyFields(_BLOCK, nested={"content": ResultBlock}),
    ResultBlock: BodyFields(_BLOCK),
    AnthropicTool: BodyFields(_ANTHROPIC_TOOL),
    ToolChoice: BodyFields(),
    Thinking: BodyFields({"display": Ignored("what is thought is always told")}),
    OutputConfig: BodyFields(
        dict.fromkeys(("effort", "task_budget"), Refused("is not supported; `thinking.budget_tokens` is"))
    ),
    ResponsesRequest: BodyFields(
        _RESPONSES, nested={"input": InputItem, "tools": FunctionTool, "reasoning": Reasoning}
    ),
    Reasoning: BodyFields(
        dict.fromkeys(("summary", "generate_summary"), Ignored("what is thought is told itself"))
    ),
    InputItem: BodyFields(_ITEM, nested=dict.fromkeys(("content", "output", "summary"), InputPart)),
    FunctionTool: BodyFields({"defer_loading": Refused()}),
    InputPart: BodyFields(_PART),
    EmbeddingsRequest: BodyFields(
        {
            **_VECTORS,
            "input_type": Refused("is not supported: put the instruction of the model into the text"),
            "task": Refused("is not supported: put the instruction of the model into the text"),
            "prompt": _named("input"),
            "inputs": _named("input"),
            "embedding_types": _named("encoding_format"),
            "additional_data": Ignored("only comes back with other servers"),
        }
    ),
    ScoreRequest: BodyFields(_VECTORS),
    RerankRequest: BodyFields(
        {
            **_VECTORS,
            "texts": _named("documents"),
            "rank_fields": Refused("is not supported: documents are texts"),
            "max_chunks_per_doc": Refused("is not supported: a document has one vector"),
        },
        nested={"documents": TextDocument},
    ),
    TextDocument: BodyFields(),
    BatchRequest: BodyFields({"output_expires_after": Refused()}),
    TokenizeRequest: BodyFields({"chat_template": Refused()}, nested={"messages": ChatMessage, "tools": Tool}),
    DetokenizeRequest: BodyFields(),
    PriorityRequest: BodyFields(),
    TGIRequest: BodyFields(
        {"options": Ignored("only matters to caches before the server")}, nested={"parameters": TGIParameters}
    ),
    TGIParameters: BodyFields(_TGI),
    LegacyRequest: BodyFields(unknown=_OLDER, nested={"parameters": LegacyParameters}),
    LegacyParameters: BodyFields(_LEGACY_IGNORED, _OLDER),
}  # fmt: skip
"""Struct of a body, or of a part of one -> what its other fields mean."""

_Object = dict[str, msgspec.Raw]
_decode_object: Final = msgspec.json.Decoder(_Object).decode
_decode_items: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_names: Final = {kind: frozenset(each.encode_name for each in msgspec.structs.fields(kind)) for kind in BODIES}
_HEADER_NAME: Final = re.compile(rf"[A-Za-z0-9_.\-]{{1,{MAX_NAME_CHARS}}}")


async def read_fields(engine: AsyncEngine, http_request: Request, kind: type[T], *, strict: bool = True) -> T:
    """The body of a request, which asks for nothing that is not served; long ones are read beside the event loop.

    Args:
        engine: Its configuration limits the size.
        http_request: The request; it remembers what is ignored.
        kind: Struct of the body.
        strict: Do not read numbers and booleans out of strings.

    Raises:
        RequestError: Names the field that is wrong, or what the body has too much of.
    """
    limits = engine.config.serving
    return await read_as(
        http_request, limits, kind, strict=strict, check=partial(check_other_fields, http_request, kind)
    )


def check_other_fields(http_request: Request, kind: type, body: bytes) -> None:
    """Refuses the first field of a valid body that is not served and asks for something; remembers what is ignored.

    Raises:
        RequestError: Names the field.
    """
    try:
        ignored = list(dict.fromkeys(_ignored(body, kind, "")))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # in what has no place in a `kind`
        raise RequestError("body", f"must be valid JSON: {shorten(malformed(body, error))}") from None
    if ignored:
        shown = [name for name in ignored if _HEADER_NAME.fullmatch(name)][:MAX_NAMED]
        others = [f"and {len(ignored) - len(shown)} more"] if len(shown) < len(ignored) else []
        http_request.state.ignored_parameters = ", ".join([*shown, *others])


def note_ignored(http_request: Request, name: str) -> None:
    """Has the header of the answer name a field, beside those that are never served."""
    http_request.state.ignored_parameters = ", ".join(filter(None, [ignored_parameters(http_request), name]))


def ignored_parameters(http_request: Request) -> str | None:
    """What the header of the answer names, if anything was ignored."""
    return getattr(http_request.state, "ignored_parameters", None)


def _ignored(text: bytes, kind: type, place: str) -> list[str]:
    content = _decode_object(text)
    if (repeated := repeated_name(text, content)) is not None:
        raise RequestError(place + repeated[:MAX_NAME_CHARS], "must be given once")
    fields, ignored = BODIES[kind], []
    for name, raw in content.items():
        if name in fields.nested:
            ignored += _ignored_within(raw, fields.nested[name], place + name)
        elif name not in _names[kind]:
            row = fields.rows.get(name, fields.unknown)
            if _asks_for_nothing(raw, row):
                continue
            if isinstance(row, Refused):
                raise RequestError(place + name[:MAX_NAME_CHARS], row.why + _suggestion(name, kind, row))
            ignored.append(name)
        elif bytes(memoryview(raw)[:1]) == b"{" and (repeated := repeated_name_within(bytes(raw))) is not None:
            raise RequestError(place + name, f"must not have the name {shorten(repeated)} twice")
    return ignored


def _ignored_within(raw: msgspec.Raw, kind: type, place: str) -> list[str]:
    begin = bytes(memoryview(raw)[:1])
    if begin == b"{":
        return _ignored(bytes(raw), kind, "" if place == "parameters" else f"{place}.")
    if begin == b"[":
        items = enumerate(_decode_items(raw))
        return [name for i, each in items for name in _ignored_within(each, kind, f"{place}[{i}]")]
    return []


def _asks_for_nothing(raw: msgspec.Raw, row: Refused | Ignored) -> bool:
    if len(raw) > MAX_NEUTRAL_BYTES:
        return False
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # valid JSON that is no value, such as 1e400
    if value is None:
        return True
    if value in ([], {}):
        return isinstance(row, Ignored) or not row.empty_asks
    # For Python, True is 1 as well.
    return isinstance(row, Refused) and any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in row.neutral
    )


def _suggestion(name: str, kind: type, row: Refused) -> str:
    if row is not BODIES[kind].unknown:
        return ""
    close = get_close_matches(name[:MAX_NAME_CHARS], _names[kind], 1)
    return f"; did you mean `{close[0]}`?" if close else ""
