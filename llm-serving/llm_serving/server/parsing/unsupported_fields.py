"""Rules for fields that clients of other servers send, but that a route of this server does not support."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from llm_serving.server.batches import schemas as batches
from llm_serving.server.protocols import text_schemas as text
from llm_serving.server.protocols.anthropic import schemas as anthropic
from llm_serving.server.protocols.openai import responses_schemas as responses
from llm_serving.server.protocols.openai import schemas as openai
from llm_serving.server.protocols.openai import vector_schemas as vectors


@dataclass(frozen=True, slots=True)
class RefusedField:
    """Rule for a field that would change the response. A request that sets the field is refused."""

    why: str = "is not supported"
    neutral: tuple[Any, ...] = ("", 0, False)
    """Values that have no effect, in addition to null and empty values."""
    empty_asks: bool = False


@dataclass(frozen=True, slots=True)
class IgnoredField:
    """Rule for a field that cannot change the response. The response header `x-ignored-parameters` names the field."""

    why: str


FieldRules = Mapping[str, RefusedField | IgnoredField]
"""Rules for fields that a client may send in a body or nested object, although the struct for it lacks them."""
ANY_OTHER: Final = "*"
"""Key of the rule for all fields that have no rule. Without this key, `UNKNOWN` is the rule."""
UNKNOWN: Final = RefusedField("is not a parameter of this route", ())
NO_ADAPTERS: Final = RefusedField("is not supported: request an adapter by its name in `model`")
SPEED_HINT: Final = IgnoredField("only a hint for speed")
TEXT_ONLY: Final = RefusedField("is not supported: the server accepts only text")
EARLIER_RESPONSE: Final = IgnoredField("only describes an earlier response")


def named(here: str) -> RefusedField:
    """Return a rule that refuses another protocol's field. Its error names `here`, the field to use instead."""
    return RefusedField(f"is not a parameter of this route; `{here}` is", ())


_TOOLS: Final = RefusedField("is not supported: this route has no tools")
_OPENAI: Final[FieldRules] = {
    "structural_tag": RefusedField("is not supported: use `tools` or a grammar instead"),
    "grammar": named("ebnf"),
    "logits_processors": RefusedField(),
    "lora_request": NO_ADAPTERS,
    "lora_path": NO_ADAPTERS,
    "adapter_id": named("model"),
    "documents": RefusedField("is not supported: put documents into `messages`"),
    "no_repeat_ngram_size": RefusedField(),
    "typical_p": RefusedField(neutral=(1,)),
    "spaces_between_special_tokens": RefusedField(neutral=(True,)),
    "do_sample": RefusedField("must be true; `temperature: 0` takes the most likely tokens", (True,)),
    "max_new_tokens": named("max_tokens"),
    "min_new_tokens": named("min_tokens"),
    "stop_sequences": named("stop"),
    "truncate": named("truncate_prompt_tokens"),
    "top_n_tokens": named("logprobs"),
    "modalities": RefusedField("is not supported: the server generates only text", (["text"],)),
    "audio": TEXT_ONLY,
    "verbosity": RefusedField(neutral=("medium",)),
    "kv_transfer_params": RefusedField(),
    "guided_decoding_backend": IgnoredField("the server has only one backend"),
    "prediction": SPEED_HINT,
    "store": IgnoredField("this route stores no responses"),
    "metadata": IgnoredField("only describes stored responses"),
    "safety_identifier": IgnoredField("only identifies the end user"),
    "prompt_cache_key": SPEED_HINT,
    "prompt_cache_retention": SPEED_HINT,
    "cache_prompt": SPEED_HINT,
    "keep_alive": IgnoredField("the model stays loaded"),
}
_VECTORS: Final[FieldRules] = {
    "max_tokens": named("truncate_prompt_tokens"),
    "messages": RefusedField("is not supported: put texts into the fields of this route"),
    "instruction": RefusedField("is not supported: put the instruction into the text"),
    "chat_template": RefusedField(),
    "mm_processor_kwargs": TEXT_ONLY,
}
_ANTHROPIC: Final[FieldRules] = {
    "output_format": named("output_config.format"),
    "mcp_servers": RefusedField(),
    "container": RefusedField(),
    "context_management": RefusedField(),
    "cache_control": SPEED_HINT,
}
_BLOCK: Final[FieldRules] = {
    "cache_control": SPEED_HINT,
    "citations": RefusedField(),
    **dict.fromkeys(("source", "title", "context"), TEXT_ONLY),
    **dict.fromkeys(("signature", "data"), EARLIER_RESPONSE),
    "is_error": IgnoredField("the content describes the error"),
    "caller": EARLIER_RESPONSE,
}
_LEGACY_IGNORED: Final[FieldRules] = dict.fromkeys(
    ("details", "decoder_input_details", "top_n_tokens", "truncate", "typical_p", "watermark"),
    IgnoredField("never had an effect on these routes"),
)
_OLDER: Final = IgnoredField("the older servers ignored unknown fields")
UNSUPPORTED: Final[Mapping[type, FieldRules]] = {
    openai.CompletionRequest: {
        **_OPENAI,
        **dict.fromkeys(("tools", "functions"), _TOOLS),
        **dict.fromkeys(("tool_choice", "function_call"), RefusedField(_TOOLS.why, ("none", "auto"))),
        "parallel_tool_calls": IgnoredField("only affects tools"),
        "suffix": RefusedField(),
    },
    openai.ChatCompletionRequest: {
        **_OPENAI,
        "functions": named("tools"),
        "function_call": RefusedField("is not a parameter of this route; `tool_choice` is", ("none", "auto")),
        "chat_template": RefusedField(),
        "web_search_options": RefusedField("is not supported: the server has no web search", empty_asks=True),
    },
    openai.StreamOptions: {"include_obfuscation": IgnoredField("chunks are never padded")},
    openai.ToolCallOfMessage: {"index": IgnoredField("calls have the order of the list")},
    openai.ChatMessage: {
        "function_call": named("tool_calls"),
        "audio": RefusedField(),
        "refusal": RefusedField(),
        "annotations": RefusedField(),
    },
    openai.ContentPart: {
        "cache_control": SPEED_HINT,
        **dict.fromkeys(("image_url", "input_audio", "audio_url", "video_url", "file", "refusal"), TEXT_ONLY),
    },
    openai.TokenizeRequest: {"chat_template": RefusedField()},
    responses.ResponsesRequest: {
        "max_tool_calls": RefusedField("is not supported: it limits built-in tools, which this server does not have"),
        "truncation": RefusedField("must be disabled: the server never truncates a conversation", ("disabled",)),
        "include": RefusedField("is not supported: responses have no optional parts"),
        "prompt": RefusedField("is not supported: the server stores no prompt templates"),
        "conversation": RefusedField("is not supported; `previous_response_id` continues a stored response"),
        "context_management": RefusedField(),
        "top_logprobs": RefusedField(),
        "max_tokens": named("max_output_tokens"),
        "messages": named("input"),
        "stream_options": IgnoredField("events are never obfuscated"),
        "safety_identifier": IgnoredField("only identifies the end user"),
        "prompt_cache_key": SPEED_HINT,
        "prompt_cache_retention": SPEED_HINT,
    },
    responses.Reasoning: dict.fromkeys(("summary", "generate_summary"), IgnoredField("reasoning is returned in full")),
    responses.InputItem: {
        **dict.fromkeys(("id", "status"), EARLIER_RESPONSE),
        "encrypted_content": RefusedField("is not supported: the server does not encrypt reasoning"),
        "phase": EARLIER_RESPONSE,
    },
    responses.FunctionTool: {"defer_loading": RefusedField()},
    responses.InputPart: {
        **dict.fromkeys(("annotations", "logprobs"), EARLIER_RESPONSE),
        **dict.fromkeys(("image_url", "file_id", "file_data", "refusal"), TEXT_ONLY),
    },
    vectors.EmbeddingsRequest: {
        **_VECTORS,
        "input_type": RefusedField("is not supported: put the instruction of the model into the text"),
        "task": RefusedField("is not supported: put the instruction of the model into the text"),
        "prompt": named("input"),
        "inputs": named("input"),
        "embedding_types": named("encoding_format"),
        "additional_data": IgnoredField("other servers only return it"),
    },
    vectors.ScoreRequest: _VECTORS,
    vectors.RerankRequest: {
        **_VECTORS,
        "texts": named("documents"),
        "rank_fields": RefusedField("is not supported: documents are texts"),
        "max_chunks_per_doc": RefusedField("is not supported: documents are not divided into chunks"),
    },
    anthropic.MessagesRequest: {
        **_ANTHROPIC,
        "metadata": IgnoredField("`user` names the tenant"),
        "inference_geo": IgnoredField("the server has only one location"),
        "stop": named("stop_sequences"),
        "max_completion_tokens": named("max_tokens"),
    },
    anthropic.CountTokensRequest: _ANTHROPIC,
    anthropic.ContentBlock: _BLOCK,
    anthropic.ResultBlock: _BLOCK,
    anthropic.AnthropicTool: {
        "cache_control": SPEED_HINT,
        "eager_input_streaming": IgnoredField("arguments are always streamed as they are generated"),
        **dict.fromkeys(("allowed_callers", "defer_loading", "input_examples"), RefusedField()),
    },
    anthropic.Thinking: {"display": IgnoredField("reasoning is always returned")},
    anthropic.OutputConfig: dict.fromkeys(
        ("effort", "task_budget"), RefusedField("is not supported; `thinking.budget_tokens` is")
    ),
    text.TGIRequest: {"options": IgnoredField("only controls caches in front of the server")},
    text.TGIParameters: {
        "watermark": RefusedField(),
        "max_tokens": named("max_new_tokens"),
        "min_tokens": named("min_new_tokens"),
        "truncate_prompt_tokens": named("truncate"),
    },
    text.LegacyRequest: {ANY_OTHER: _OLDER},
    text.LegacyParameters: {**_LEGACY_IGNORED, ANY_OTHER: _OLDER},
    batches.BatchRequest: {"output_expires_after": RefusedField()},
}
"""Struct of a body or of a part of a body -> its unsupported fields. Other structs refuse all unknown fields."""
