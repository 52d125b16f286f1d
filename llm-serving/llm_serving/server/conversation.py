"""A conversation as a prompt, and the generation that answers it: what all routes of conversations have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec
from starlette.requests import Request

from llm_serving.core.sampling_params import Whole
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import ContextLengthError, RequestError
from llm_serving.server.answer_blocks import AnswerBlocks
from llm_serving.server.answer_form import asked_form, check_others, compiled, text_of
from llm_serving.server.answered_message import AnsweredMessage
from llm_serving.server.caller import HttpCaller
from llm_serving.server.choices import ONE_ANSWER, Choices
from llm_serving.server.deadline import before
from llm_serving.server.fair_threads import FairThreads
from llm_serving.server.generation import Generation, encode_text, start_generation, truncated
from llm_serving.server.idempotency.request import Turn
from llm_serving.server.knock import knock
from llm_serving.server.off_loop import INLINE_BYTES, off_loop
from llm_serving.server.openai_requests import Identity, identify
from llm_serving.server.prompt_logprobs import check_prompt_logprobs, check_size
from llm_serving.server.receipts import ReceiptDraft
from llm_serving.server.sampling import bad_words, sampling_params
from llm_serving.server.schemas import ChatCompletionRequest, ChatMessage
from llm_serving.server.thinking import asked_budget
from llm_serving.server.tools import OfferedTools, answer_parser, bound_form, offered_tools, plain_call, thought_counter
from llm_serving.text.chat_template.template import NUM_PROCESSES

MAX_MESSAGES: Final = 4096
ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
"""Of messages, as OpenAI's protocol has them."""
SAME_ROLES: Final = {"developer": "system", "function": "tool"}
"""What a role is called by chat templates that do not name it."""
RESERVED_VARIABLES: Final = ("add_generation_prompt", "continue_final_message", "messages", "self", "tools")
"""What a chat template gets from us, or Jinja takes for itself."""
_LIMIT: Final = Whole(1)
_RENDERING: Final = FairThreads(NUM_PROCESSES, "chat-template")
"""Threads that wait for templates: other work beside the loop does not wait with them, and nobody behind all that
somebody else asks for: long conversations take long, also where their tokens are only counted."""


async def converse(
    engine: AsyncEngine,
    request: ChatCompletionRequest,
    *,
    caller: HttpCaller,
    identity: Identity,
    choices: Choices,
    logprobs: int | None,
    offered: OfferedTools | None = None,
    turn: Turn | None = None,
    receipt: ReceiptDraft | None = None,
) -> tuple[list[int], Generation]:
    """Starts to answer a conversation.

    Args:
        engine: Answers.
        request: The conversation and its parameters.
        caller: Who asks.
        identity: Of the answer.
        choices: How many answers, and how they are found.
        logprobs: Most likely tokens to tell beside each; None: nothing.
        offered: Tools that the model may call.
        turn: What is known of the request besides.
        receipt: Of the answer.

    Returns:
        The prompt's token ids, and its generation.

    Raises:
        LLMServingError: The conversation or a parameter breaks a rule, or the engine refuses it.
    """
    words = await off_loop(bool(request.bad_words), lambda: bad_words(engine, request.bad_words))
    decided: dict[str, Any] = {"logprobs": logprobs, "bad_words": words}
    decided["defaults"] = engine.sampling_defaults
    limited_by, limit = _limit(request)
    decided["names"] = {"max_tokens": limited_by}
    if offered is not None and offered.format.special_tokens:
        decided["skip_special_tokens"] = False
    least, longest = (1, engine.max_model_len) if limit is None else (limit, limit)
    checked = sampling_params(request, max_tokens=longest, **decided)  # before there is a text
    form = asked_form(request)
    if offered is not None and (bound_by := offered.bound_by) is not None:
        check_others(request, bound_by)
        if form is not None and offered.must_call:
            raise RequestError(form.field, f"must not be given together with `{bound_by}`")
    budget = asked_budget(request, engine.config.serving)
    if budget is not None:
        check_others(request, budget.field)
    if checked.prompt_logprobs is not None:
        check_prompt_logprobs(request, "prompt_logprobs", choices)
    said = await off_loop(_says_much(request), lambda: _said(request))
    entry = await knock(
        engine,
        caller,
        [said],
        least,
        names={"prompt": "messages", "max_tokens": limited_by, "n": choices.counted_by},
        num_each=choices.best_of,
        frame=2,
        truncates=request.truncate_prompt_tokens is not None,
        known=turn is not None and turn.known,
    )
    text = await before(caller.deadline, engine.clock, render_chat(engine, caller.source, request, offered))
    whole = await encode_text(engine, text, "messages", add_special_tokens=bool(request.add_special_tokens))
    prompt = truncated(engine, whole, request.truncate_prompt_tokens, least)
    check_size([prompt], checked, "prompt_logprobs", 1)
    if limit is None:
        remaining = engine.max_model_len - len(prompt)
        if remaining < 1:
            rule = f"must leave room for an answer within {engine.max_model_len} tokens"
            raise ContextLengthError("messages", rule, len(prompt))
        limit = min(remaining, engine.sampling_defaults.get("max_tokens", remaining))
    bound = bound_form(engine, request, prompt, form, offered, budget)
    constraint = await before(caller.deadline, engine.clock, compiled(engine, bound, caller.source))
    decided["constraint"] = text_of(constraint)
    sampling = sampling_params(request, max_tokens=limit, **decided)
    generation = await start_generation(
        entry,
        [prompt],
        [sampling],
        choices=choices,
        request_id=identity.request_id,
        constraint=constraint,
        turn=turn,
        receipt=receipt,
    )
    return prompt, generation


async def converse_once(
    engine: AsyncEngine,
    http_request: Request,
    request: ChatCompletionRequest,
    *,
    caller: HttpCaller,
    prefix: str,
    reworded: Callable[[RequestError], RequestError],
) -> tuple[Identity, Generation, AnswerBlocks]:
    """Starts to give one answer to a conversation that came in the words of another protocol.

    Args:
        engine: Answers.
        http_request: It came with.
        request: The conversation and its parameters.
        caller: Who asks.
        prefix: Of the answer's id.
        reworded: Gives an error the names that its fields have there.

    Returns:
        What the answer is called, its pieces, and what they become.

    Raises:
        LLMServingError: As `converse`.
    """
    identity = identify(engine, http_request, request, prefix)
    try:
        offered = offered_tools(engine, request)
        prompt, generation = await converse(
            engine, request, caller=caller, identity=identity, choices=ONE_ANSWER, logprobs=None, offered=offered
        )
    except RequestError as error:
        raise reworded(error) from None
    thoughts = thought_counter(engine, request, prompt)
    message = AnsweredMessage(answer_parser(engine, request, prompt, offered), offered, thoughts=thoughts)
    return identity, generation, AnswerBlocks(message)


async def render_chat(
    engine: AsyncEngine, source: str, request: ChatCompletionRequest, offered: OfferedTools | None
) -> str:
    """The prompt text of a conversation, rendered off the event loop.

    Args:
        engine: Has the template.
        source: Who asks, as of `HttpCaller`.
        request: The conversation, and how its prompt ends.
        offered: Tools that the model may call.

    Raises:
        RequestError: A message has no text or no known role, a variable has a reserved name, or the chat template
            refuses them.
    """
    messages, adds_prompt = request.messages, _adds_generation_prompt(request)
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise RequestError("messages", f"must hold 1 to {MAX_MESSAGES} messages", len(messages))
    extra = dict(request.chat_template_kwargs or {})
    for name in RESERVED_VARIABLES:
        if name in extra:
            raise RequestError("chat_template_kwargs", f"must not hold any of {', '.join(RESERVED_VARIABLES)}", name)

    if offered is not None:
        extra["tools"] = offered.for_template

    def render() -> str:
        template = engine.tokenizer.chat_template(with_tools=offered is not None)
        plain = [plain_message(i, message) for i, message in enumerate(messages)]
        for each in plain:
            each["role"] = role_in(template, each["role"])
        return engine.tokenizer.apply_chat_template(
            plain,
            add_generation_prompt=adds_prompt,
            continue_final_message=bool(request.continue_final_message),
            **extra,
        )

    return await asyncio.wrap_future(_RENDERING.submit(source, render))


def role_in(template: str, role: str) -> str:
    """What a role is called in the text of a chat template."""
    is_named = f"'{role}'" in template or f'"{role}"' in template
    return role if is_named else SAME_ROLES.get(role, role)


def plain_message(index: int, message: ChatMessage) -> dict[str, Any]:
    """What a chat template gets of a message.

    Raises:
        RequestError: It has a role that is not known, a part that is no text, or a call without proper arguments.
    """
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
            plain_call(f"messages[{index}].tool_calls[{i}]", call) for i, call in enumerate(message.tool_calls)
        ]
    return plain


def _adds_generation_prompt(request: ChatCompletionRequest) -> bool:
    if not request.continue_final_message:
        return request.add_generation_prompt is not False
    if request.add_generation_prompt:
        raise RequestError("continue_final_message", "must not be given together with `add_generation_prompt`")
    return False


def _says_much(request: ChatCompletionRequest) -> bool:
    """Whether it may be: what has no length that tells its size is taken for much."""
    if request.tools or request.chat_template_kwargs or any(each.tool_calls for each in request.messages):
        return True
    texts = (text for each in request.messages for text in (each.content, each.reasoning_content) if text)
    return sum(len(text) if isinstance(text, str) else INLINE_BYTES for text in texts) >= INLINE_BYTES


def _said(request: ChatCompletionRequest) -> str:
    """All that the template is given, as one text."""
    return msgspec.json.encode((request.messages, request.chat_template_kwargs, request.tools)).decode()


def _limit(request: ChatCompletionRequest) -> tuple[str, int | None]:
    """The field that limits the answer, and to how many tokens; of `max_completion_tokens` and its older name the
    smaller one counts. None: it is as long as fits."""
    newer, older = request.max_completion_tokens, request.max_tokens
    for name, given in (("max_completion_tokens", newer), ("max_tokens", older)):
        if given is not None:
            _LIMIT.checked(name, given)
    if newer is None or (older is not None and older < newer):
        return "max_tokens", older
    return "max_completion_tokens", newer
