"""Bodies and responses of the OpenAI routes, and the fields that all generation routes share."""

from __future__ import annotations

from typing import Any, Final

from msgspec import UNSET, Raw, Struct, UnsetType, field

from llm_serving import __version__
from llm_serving.server.parsing.offload import Long

JsonObject = dict[str, Any]


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CallerFields(Struct, kw_only=True):
    """The fields of all generation routes that describe the caller."""

    priority: int | None = None
    """Selects the class with the largest `rank` up to this number. Smaller runs first. Header: `x-priority`."""
    priority_class: str | None = None
    """Not together with `priority`. Header: `x-request-class`."""
    service_tier: str | None = None
    """Selects the class with this `service_tier`. Ignored if `priority` or `priority_class` is given."""
    user: str | None = None
    """The tenant, unless an API key identifies it. Tenants share a request class fairly."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    timeout_s: float | None = None
    """Header: `x-request-timeout-s`."""


class LoadAdapterRequest(Struct):
    lora_name: str
    lora_path: str
    """A folder inside `lora_config.lora_folder`."""


class UnloadAdapterRequest(Struct):
    lora_name: str


class PriorityRequest(Struct):
    """A new priority, given either as a number or as a request class. The fields are the same as in `CallerFields`."""

    priority: int | None = None
    priority_class: str | None = None


class GenerationRequest(CallerFields, kw_only=True):
    """The fields that completions and chat share. A field whose value is null counts as absent."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """Number of most likely tokens to sample from. 0 and -1 mean all tokens."""
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    n: int | None = None
    best_of: int | None = None
    """Number of sequences to generate, of which the best `n` are returned. With `use_beam_search`: number of beams."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    """Texts that must not be generated. The last token of a text is banned after the others."""
    allowed_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    response_format: JsonObject | None = None
    """Type `text`, `json_object` or `json_schema`. Only one field may request structured output."""
    structured_outputs: JsonObject | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    """A grammar in Lark or GBNF."""
    guided_whitespace_pattern: str | None = None
    json_schema: JsonObject | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    """Beam search ranks by logprob / length ** length_penalty."""
    early_stopping: bool | None = None
    """Beam search stops as soon as `best_of` sequences have finished."""
    detokenize: bool | None = None
    """If false, the response has no text. `return_token_ids` returns the tokens."""
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens. Default: true for completions, false for chat templates."""
    truncate_prompt_tokens: int | None = None
    request_id: str | None = None
    receipt: bool | None = None
    """Also return a receipt, with which `llm-serving verify` recomputes the response. A stream's last chunk has it."""


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None


class ContentPart(Struct):
    type: str
    text: str | None = None


class FunctionOfMessage(Struct, omit_defaults=True):
    name: str
    arguments: str | JsonObject


class ToolCallOfMessage(Struct, omit_defaults=True):
    function: FunctionOfMessage
    id: str | None = None
    type: str = "function"


class ChatMessage(Struct, omit_defaults=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallOfMessage] | None = None
    tool_call_id: str | None = None
    """Id of the call whose result this message is; for the role `tool`."""
    reasoning_content: str | None = None


class Function(Struct, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    """Whether the arguments of a call are constrained to `parameters`."""


class Tool(Struct, omit_defaults=True):
    function: Function
    type: str = "function"


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    """Default: true, but false with `continue_final_message`."""
    continue_final_message: bool | None = None
    """Leave the last message open, so that the response continues it."""
    echo: bool | None = None
    """Begin the response with the text of the last message, if it is the assistant's."""
    tools: list[Tool] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    thinking_token_budget: int | None = None
    """Maximum number of reasoning tokens. Give only one of this and the next three fields."""
    thinking_budget: int | None = None
    max_thinking_tokens: int | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: JsonObject | None = None


class TokenizeRequest(Struct, kw_only=True):
    """A body with either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    """This field and the next three mean the same as in chat completions, and require `messages`."""
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: JsonObject | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Present only if the server parses the reasoning of the model."""


class PromptLogprob(Struct):
    logprob: float
    rank: int
    decoded_token: str


class CompletionLogprobs(Long):
    tokens: list[str]
    token_logprobs: list[float | None]
    """Logprob of each token; null for the first token of a prompt."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Long, kw_only=True):
    """A complete choice, or the delta of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    """Token id -> logprob, for the token and the most likely ones, at each position of the prompt."""


FINGERPRINT: Final = f"llm-serving-{__version__}"


class Completion(Long, kw_only=True):
    """A complete response, or one chunk of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    receipt: Raw | UnsetType = UNSET


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = field(default_factory=list)


class ChatLogprobs(Long):
    content: list[TokenLogprob]


class CalledFunction(Struct):
    name: str
    arguments: str


class ToolCall(Struct, kw_only=True):
    id: str
    type: str = "function"
    function: CalledFunction


class ChatResponseMessage(Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Long, kw_only=True):
    index: int
    message: ChatResponseMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Long, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str = FINGERPRINT
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    receipt: Raw | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    index: int
    delta: JsonObject
    """May have `role`, `content`, `reasoning_content` or `tool_calls`, as in a message."""
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    receipt: Raw | UnsetType = UNSET


class TokenizeResponse(Long):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeResponse(Long):
    prompt: str


class TokenizerInfo(Long, kw_only=True):
    """The tokenizer, for clients that render chat templates and count tokens themselves."""

    tokenizer_class: str | None
    chat_template: str | None
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None


class ModelCard(Struct, kw_only=True):
    id: str
    object: str = "model"
    type: str = "model"
    """Field of Anthropic's protocol, as are the next two."""
    display_name: str
    created_at: str
    created: int
    owned_by: str = "llm-serving"
    root: str
    parent: str | None = None
    max_model_len: int
    kind: str | UnsetType = UNSET
    """generate, embed or score; only if the server has several models."""
    aliases: tuple[str, ...] | UnsetType = UNSET
    """Other names by which requests may select the model; only if the server has several models."""


class ModelList(Struct, kw_only=True):
    object: str = "list"
    data: list[ModelCard]
    has_more: bool = False


class Page(Long, kw_only=True):
    """Base of one page of a list, whose field `data` holds the rows."""

    object: str = "list"
    first_id: str | None
    last_id: str | None
    has_more: bool


class HealthResponse(Struct):
    status: str
    detail: str
    loading: bool


class VersionResponse(Struct):
    version: str


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Struct):
    error: ErrorDetail
