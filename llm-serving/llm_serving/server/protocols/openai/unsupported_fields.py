"""Rules for unsupported fields of request bodies, and the rules of completions, chat and the tokenizer routes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from llm_serving.server.protocols.openai import schemas


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
    "modalities": RefusedField("must be text alone", (["text"],)),
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
UNSUPPORTED: Final[Mapping[type, FieldRules]] = {
    schemas.CompletionRequest: {
        **_OPENAI,
        **dict.fromkeys(("tools", "functions"), _TOOLS),
        **dict.fromkeys(("tool_choice", "function_call"), RefusedField(_TOOLS.why, ("none", "auto"))),
        "parallel_tool_calls": IgnoredField("only affects tools"),
        "suffix": RefusedField(),
    },
    schemas.ChatCompletionRequest: {
        **_OPENAI,
        "functions": named("tools"),
        "function_call": RefusedField("is not a parameter of this route; `tool_choice` is", ("none", "auto")),
        "chat_template": RefusedField(),
        "web_search_options": RefusedField("is not supported: the server has no web search", empty_asks=True),
    },
    schemas.StreamOptions: {"include_obfuscation": IgnoredField("chunks are never padded")},
    schemas.ToolCallOfMessage: {"index": IgnoredField("calls have the order of the list")},
    schemas.ChatMessage: {
        "function_call": named("tool_calls"),
        "audio": RefusedField(),
        "refusal": RefusedField(),
        "annotations": RefusedField(),
    },
    schemas.ContentPart: {
        "cache_control": SPEED_HINT,
        **dict.fromkeys(("image_url", "input_audio", "audio_url", "video_url", "file", "refusal"), TEXT_ONLY),
    },
    schemas.TokenizeRequest: {"chat_template": RefusedField()},
}
