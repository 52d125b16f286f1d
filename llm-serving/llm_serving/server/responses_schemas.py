"""Bodies of the routes of OpenAI's responses."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

from llm_serving.server.off_loop import Long
from llm_serving.server.schemas import CallerFields, JsonObject


class InputPart(Struct):
    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: str


class InputItem(Struct, kw_only=True):
    """A message, or a thought or a call of an answer that comes back, or what a called function gave."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    """Of a message; of reasoning, if it is told."""
    call_id: str | None = None
    """Of a call and of its output."""
    name: str | None = None
    arguments: str | None = None
    """Of a call: a JSON object, as text."""
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    """Of reasoning."""


class FunctionTool(Struct, kw_only=True):
    type: str
    """`function`."""
    name: str | None = None
    description: str | None = None
    parameters: JsonObject | None = None
    """A JSON schema of the arguments."""
    strict: bool | None = None
    """Bind the arguments of calls to that schema: false, if anything."""


class Reasoning(Struct, kw_only=True):
    effort: str | None = None
    """A budget of thoughts by name: none, minimal, low, medium or high."""


class ResponsesRequest(CallerFields, kw_only=True):
    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    """Said before the conversation, by the system; not kept for the next response."""
    previous_response_id: str | None = None
    """Of a stored response, whose conversation this one goes on with."""
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    """Beyond the protocol: the same seed has the same answer."""
    tools: list[FunctionTool] | None = None
    """Functions that the model may call."""
    tool_choice: str | JsonObject | None = None
    """`auto`, `none`, `required`, or the function that must be called."""
    parallel_tool_calls: bool | None = None
    """False: of several calls only the first is told."""
    reasoning: Reasoning | None = None
    text: JsonObject | None = None
    """`format`: the form of what is said, `text`, `json_object` or `json_schema`."""
    stream: bool | None = None
    background: bool | None = None
    """Answer at once and compute on; only with `store`, not with `stream`."""
    store: bool | None = None
    """Keep the response for a while. Not given: true."""
    metadata: dict[str, str] | None = None


class OutputText(Struct, tag="output_text", tag_field="type"):
    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


class OutputMessage(Struct, tag="message", tag_field="type", kw_only=True):
    id: str
    status: str
    role: str = "assistant"
    content: list[OutputText]


class FunctionCallItem(Struct, tag="function_call", tag_field="type", kw_only=True):
    id: str
    call_id: str
    name: str
    arguments: str
    """A JSON object, as text."""
    status: str


class ReasoningText(Struct, tag="reasoning_text", tag_field="type"):
    text: str


class ReasoningItem(Struct, tag="reasoning", tag_field="type", kw_only=True):
    id: str
    summary: list[Any] = field(default_factory=list)
    content: list[ReasoningText] = field(default_factory=list)
    status: str


OutputItem = OutputMessage | FunctionCallItem | ReasoningItem


class InputText(Struct, tag="input_text", tag_field="type"):
    text: str


class InputMessage(Struct, kw_only=True):
    id: str
    type: str = "message"
    role: str
    status: str = "completed"
    content: list[InputText]


class FunctionOutputItem(Struct, kw_only=True):
    id: str
    type: str = "function_call_output"
    call_id: str | None
    output: str
    status: str = "completed"


GivenItem = InputMessage | FunctionOutputItem | OutputItem
"""Of a conversation before a response."""


class InputItemList(Long, kw_only=True):
    object: str = "list"
    data: list[Any]
    """Messages, thoughts, calls and their outputs, each with an id."""
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokensDetails(Struct):
    cached_tokens: int


class OutputTokensDetails(Struct):
    reasoning_tokens: int = 0


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Failure(Struct):
    code: str
    message: str


class IncompleteDetails(Struct):
    reason: str


class ResponseObject(Long, kw_only=True):
    id: str
    object: str = "response"
    created_at: int
    status: str
    """in_progress, completed, incomplete, failed or cancelled."""
    background: bool = False
    error: Failure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    model: str
    output: list[OutputItem] = field(default_factory=list)
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: Reasoning = field(default_factory=Reasoning)
    store: bool = True
    temperature: float | None = None
    text: JsonObject = field(default_factory=lambda: {"format": {"type": "text"}})
    tool_choice: str | JsonObject = "auto"
    tools: list[FunctionTool] = field(default_factory=list)
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None


class ResponseEvent(Struct, kw_only=True):
    """One event of a stream; which fields it has depends on its type."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET


class DeletedResponse(Struct):
    id: str
    object: str = "response"
    deleted: bool = True
