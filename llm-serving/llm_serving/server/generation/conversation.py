"""Chat requests: the steps that all chat protocols share, and messages in the form that a chat template reads."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from random import SystemRandom
from typing import Any, Final

import msgspec
from starlette.requests import Request

from llm_serving.core.enums import SpecialTokensName
from llm_serving.core.sampling_params import MAX_LOGPROBS, Whole
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import ContextLengthError, RequestError
from llm_serving.server.generation import pipeline, tools
from llm_serving.server.generation.logprobs import check_prompt_logprobs, check_prompt_logprobs_size
from llm_serving.server.generation.message import MessageParser
from llm_serving.server.generation.sampling import bad_words, choices_of, sampling_params
from llm_serving.server.generation.structured_output import check_compatible, structured_output_of
from llm_serving.server.parsing.offload import INLINE_BYTES, FairThreads, off_loop
from llm_serving.server.protocols.openai.schemas import CallerFields, ChatCompletionRequest, ChatMessage, JsonObject
from llm_serving.text.chat_template import NUM_PROCESSES
from llm_serving.text.tool_parsers import TOOL_FORMATS, format_in

MAX_MESSAGES: Final = 4096
ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
RESERVED_VARIABLES: Final = ("add_generation_prompt", "continue_final_message", "messages", "self", "tools")
MIN_EFFORT: Final = "low"
MAX_TEMPLATE_FACTOR: Final = 2
"""Maximum ratio of the length of the rendered conversation to the length of its JSON."""
_LIMIT: Final = Whole(1)
_RENDERING: Final = FairThreads(NUM_PROCESSES, "chat-template")
"""Threads for chat templates only. Clients share them fairly, because long conversations take long to render."""
FALLBACK_ROLES: Final = {"developer": "system", "function": "tool"}
"""Role -> its replacement for chat templates that do not mention it."""
_THINKING: Final = re.compile(r"\.(thinking|thought)\b|\[['\"](thinking|thought)['\"]\]")
_NO_CONTENT: Final = re.compile(r"\[['\"]content['\"]\] is none\b")
_ARGUMENTS_AS_TEXT: Final = re.compile(
    r"\+\s*\w+(?:\[['\"]function['\"]\]|\.function)?(?:\[['\"]arguments['\"]\]|\.arguments)\s*(?:\+|-?\}\})"
)
"""Matches chat templates that append the arguments of a tool call to a string. They need the arguments as a string."""
_TOOLS: Final = re.compile(r"\btools\b")
_ONE_TEXT: Final = "message.content and message.thinking"
"""Text in chat templates (gpt-oss) that reject a message which has tool calls, `content` and `thinking`."""


class ConversationRequest(pipeline.ProtocolRequest):
    def __init__(
        self, engine: AsyncEngine, http_request: Request, body: CallerFields, chat: ChatCompletionRequest
    ) -> None:
        super().__init__(engine, http_request, body)
        self.chat = chat
        self.choices = choices_of(chat, 1)
        self.offered: tools.OfferedTools | None = None

    async def prepare(self) -> pipeline.PrecheckInput:
        engine, chat = self.engine, self.chat
        logprobs = _num_logprobs(chat)
        self.offered = offered = tools.offered_tools(engine, chat)
        decided: dict[str, Any] = {"logprobs": logprobs, "bad_words": await bad_words(engine, chat.bad_words)}
        limited_by, self._limit = _output_limit(chat)
        if tools.shows_special_tokens(engine, offered):
            decided["skip_special_tokens"] = False
        least, most = (1, engine.max_model_len) if self._limit is None else (self._limit, self._limit)
        self._sampling = sampling_params(
            chat, {"max_tokens": limited_by}, engine.sampling_defaults, max_tokens=most, **decided
        )
        self._content = structured_output_of(chat)
        if offered is not None and (constrained_by := offered.constrained_by) is not None:
            check_compatible(chat, constrained_by)
            if self._content is not None and offered.calls.must:
                raise RequestError(self._content.field, f"must not be given together with `{constrained_by}`")
        self._budget = tools.reasoning_budget(chat, engine.config.serving)
        if self._budget is not None:
            check_compatible(chat, self._budget.field)
        if self._sampling.prompt_logprobs is not None:
            check_prompt_logprobs(chat, "prompt_logprobs", self.choices)
        self._least_tokens = least
        read = (chat.messages, chat.chat_template_kwargs, chat.tools)
        return pipeline.PrecheckInput(
            [await off_loop(_is_long(chat), lambda: msgspec.json.encode(read).decode())],
            least,
            {"prompt": "messages", "max_tokens": limited_by, "n": self.choices.counted_by},
            self.choices.best_of,
            MAX_TEMPLATE_FACTOR,
            truncates=chat.truncate_prompt_tokens is not None,
        )

    async def encode(self) -> pipeline.EncodedRequest:
        engine, chat = self.engine, self.chat
        whole = await encode_chat(engine, self.caller.source, chat, self.offered)
        prompt = pipeline.truncate_prompt(engine, whole, chat.truncate_prompt_tokens, self._least_tokens)
        sampling = self._sampling
        check_prompt_logprobs_size([prompt], sampling, "prompt_logprobs", 1)
        if self._limit is None:
            remaining = engine.max_model_len - len(prompt)
            if remaining < 1:
                rule = f"must leave room for an answer within {engine.max_model_len} tokens"
                raise ContextLengthError("messages", rule, len(prompt))
            max_tokens = min(remaining, engine.sampling_defaults.get("max_tokens", remaining))
            sampling = replace(sampling, max_tokens=max_tokens)
        self._reasoning = tools.reasoning_of(engine, chat, prompt)
        output = tools.chat_output(engine, chat, self._reasoning, self._content, self.offered, self._budget)
        return pipeline.EncodedRequest([prompt], sampling, output)

    def message_parsers(self, started: pipeline.StartedGeneration) -> list[MessageParser]:
        idempotent = started.idempotent
        return [
            MessageParser(
                tools.output_parser(self.chat, self._reasoning, self.offered),
                self.offered,
                SystemRandom() if idempotent is None else idempotent.id_generator(choice),
                tools.reasoning_counter(self.engine.tokenizer, self._reasoning),
            )
            for choice in range(self.choices.n)
        ]


async def encode_chat(
    engine: AsyncEngine, source: str, request: ChatCompletionRequest, offered: tools.OfferedTools | None
) -> list[int]:
    """Render a conversation in a thread, and return its token ids. Raise RequestError if the request is invalid."""
    messages, adds_prompt = request.messages, _adds_generation_prompt(request)
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise RequestError("messages", f"must hold 1 to {MAX_MESSAGES} messages", len(messages))
    extra = dict(request.chat_template_kwargs or {})
    for name in RESERVED_VARIABLES:
        if name in extra:
            raise RequestError("chat_template_kwargs", f"must not hold any of {', '.join(RESERVED_VARIABLES)}", name)
    if offered is not None:
        extra["tools"] = offered.for_template

    effort, template = request.reasoning_effort, engine.tokenizer.chat_template(with_tools=offered is not None)
    if not template and engine.pooling is not None and engine.pooling.embedding_only:
        raise RequestError("model", engine.pooling.refusal)
    if effort is not None and "reasoning_effort" in template:
        extra.setdefault("reasoning_effort", MIN_EFFORT if effort in ("none", "minimal") else effort)

    is_typed = engine.config.serving.special_tokens_in_content == SpecialTokensName.TEXT

    def render() -> tuple[str, str]:
        plain = [adapted_message(template, template_message(i, message)) for i, message in enumerate(messages)]
        describe = None if offered is None else offered.calls.format.describe_tools
        if offered is not None and describe is not None and not _TOOLS.search(template):
            plain = with_system_text(plain, describe(offered.for_template))
        plain, sentinel = engine.tokenizer.typed_text.insert_sentinels(plain) if is_typed else (plain, "")
        plain = with_shown_calls(template, plain)  # calls get no sentinels, so their special tokens work
        text = engine.tokenizer.apply_chat_template(
            plain,
            add_generation_prompt=adds_prompt,
            continue_final_message=bool(request.continue_final_message),
            **extra,
        )
        return text, sentinel

    text, sentinel = await asyncio.wrap_future(_RENDERING.submit(source, render))
    adds_special = bool(request.add_special_tokens)
    if not sentinel:
        return await pipeline.encode_text(engine, text, "messages", adds_special)
    pipeline.check_length(engine, text.replace(sentinel, ""), "messages")
    encode = engine.tokenizer.typed_text.encode
    return await pipeline.tokenized(True, lambda: encode(text, sentinel, adds_special), "messages")


def template_message(index: int, message: ChatMessage) -> dict[str, Any]:
    """Convert a message into the form that chat templates read. Raise RequestError if it is invalid."""
    if message.role not in ROLES:
        raise RequestError(f"messages[{index}].role", f"must be one of {', '.join(ROLES)}", message.role)
    content = message.content
    if isinstance(content, list):
        for i, part in enumerate(content):
            if part.type != "text":
                raise RequestError(f"messages[{index}].content[{i}].type", "must be text", part.type)
            if part.text is None:
                raise RequestError(f"messages[{index}].content[{i}].text", "is required")
        content = "\n".join(part.text for part in content if part.text is not None)
    plain: dict[str, Any] = {"role": message.role, "content": content or ""}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [
            tools.template_call(f"messages[{index}].tool_calls[{i}]", call) for i, call in enumerate(message.tool_calls)
        ]
    return plain


def nested_schema(flat: JsonObject) -> JsonObject:
    """Return chat completions' `response_format` for a flat `{"type": "json_schema", "name": ..., "schema": ...}`."""
    return {"type": "json_schema", "json_schema": {name: each for name, each in flat.items() if name != "type"}}


def flat_error(error: RequestError, format_field: str) -> RequestError:
    """Return an error of chat completions with the field name of a protocol that does not nest functions and schemas.
    `tools[0].function.name` becomes `tools[0].name`, `tool_choice.function.name` becomes `tool_choice.name`, and
    `response_format.json_schema` becomes `format_field`.
    """
    if error.field.startswith("tools["):
        return error.renamed(error.field.replace(".function.", "."))
    if error.field.startswith("tool_choice.function"):
        return error.renamed(error.field.replace(".function", ""))
    if error.field.startswith("response_format"):
        inner = error.field.removeprefix("response_format").removeprefix(".json_schema")
        return error.renamed(f"{format_field}{inner}")
    return error


def _adds_generation_prompt(request: ChatCompletionRequest) -> bool:
    if not request.continue_final_message:
        return request.add_generation_prompt is not False
    if request.add_generation_prompt:
        raise RequestError("continue_final_message", "must not be given together with `add_generation_prompt`")
    return False


def _is_long(request: ChatCompletionRequest) -> bool:
    if request.tools or request.chat_template_kwargs or any(each.tool_calls for each in request.messages):
        return True
    texts = (text for each in request.messages for text in (each.content, each.reasoning_content) if text)
    return sum(len(text) if isinstance(text, str) else INLINE_BYTES for text in texts) >= INLINE_BYTES


def _num_logprobs(request: ChatCompletionRequest) -> int | None:
    top = request.top_logprobs
    if not request.logprobs:
        if top:
            raise RequestError("top_logprobs", "requires logprobs: true", top)
        return None
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise RequestError("top_logprobs", f"must be an integer from 0 to {MAX_LOGPROBS}", top)
    return top or 0


def _output_limit(request: ChatCompletionRequest) -> tuple[str, int | None]:
    newer, older = request.max_completion_tokens, request.max_tokens
    for name, given in (("max_completion_tokens", newer), ("max_tokens", older)):
        if given is not None:
            _LIMIT.checked(name, given)
    if newer is None or (older is not None and older < newer):
        return "max_tokens", older
    return "max_completion_tokens", newer


def template_role(template: str, role: str) -> str:
    is_named = f"'{role}'" in template or f'"{role}"' in template
    return role if is_named else FALLBACK_ROLES.get(role, role)


def adapted_message(template: str, message: dict[str, Any]) -> dict[str, Any]:
    """Convert a result of `template_message` to the role, fields and types that the chat template `template` reads."""
    adapted = message | {"role": template_role(template, message["role"])}
    calls = message.get("tool_calls")
    name = None if "reasoning_content" in template else _THINKING.search(template)
    if "reasoning_content" in message and name is not None:
        thinking = adapted.pop("reasoning_content")
        if calls and message["content"] and _ONE_TEXT in template:
            thinking, adapted["content"] = f"{thinking}\n\n{message['content']}", ""
        adapted[name[1] or name[2]] = thinking
    if calls and not message["content"] and _NO_CONTENT.search(template):
        adapted["content"] = None
    if calls and _ARGUMENTS_AS_TEXT.search(template):
        texts = [json.dumps(call["function"]["arguments"], ensure_ascii=False) for call in calls]
        adapted["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": text}} for call, text in zip(calls, texts, strict=True)
        ]
    return adapted


def with_system_text(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [first | {"content": f"{first['content']}\n\n{text}" if first["content"] else text}, *messages[1:]]


def with_shown_calls(template: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Append the tool calls of each message to its content as text, if the chat template does not render tool calls."""
    name = None if "tool_calls" in template else format_in(template)
    write = None if name is None else TOOL_FORMATS[name].written
    if write is None:
        return messages
    shown = []
    for message in messages:
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        shown.append(message | {"content": message["content"] + write(calls)} if calls else message)
    return shown
