"""Bodies of the routes of OpenAI's responses."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

from llm_serving.server.parsing.offload import Long
from llm_serving.server.protocols.openai.schemas import CallerFields, JsonObject, Page


class InputPart(Struct):
    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: str


class InputItem(Struct, kw_only=True):
    """A message, the reasoning or a call of an earlier response, or the output of a called function."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None


class FunctionTool(Struct, kw_only=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Reasoning(Struct, kw_only=True):
    effort: str | None = None


class ResponsesRequest(CallerFields, kw_only=True):
    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    """System message before the conversation. It is not stored for the next response."""
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    """An extension of the protocol."""
    tools: list[FunctionTool] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: JsonObject | None = None
    """`format`: the response format, of type `text`, `json_object` or `json_schema`."""
    stream: bool | None = None
    background: bool | None = None
    """Respond at once and generate in the background; only with `store`, not with `stream`."""
    store: bool | None = None
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


class InputItemList(Page):
    data: list[Any]


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


class ResponseFailure(Struct):
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
    error: ResponseFailure | None = None
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


class DeletedResponse(Struct):
    id: str
    object: str = "response"
    deleted: bool = True
