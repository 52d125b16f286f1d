"""Request bodies of the routes of Text Generation Inference (TGI) and of the older `llm-serving` server (`legacy`)."""

from __future__ import annotations

from llm_serving.server.protocols.openai.schemas import CallerFields, JsonObject


class TGIParameters(CallerFields):
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_sequences: list[str] | None = None
    seed: int | None = None
    truncate: int | None = None
    return_full_text: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    """Return the tokens of the prompt with their log-probabilities; not streamed."""
    best_of: int | None = None
    """The response is the one with the highest mean logprob of this number of sequences."""
    top_n_tokens: int | None = None
    adapter_id: str | None = None
    grammar: JsonObject | None = None
    """Structured output: `type` is json, json_object, json_schema or regex, `value` the schema or expression."""


class TGIRequest(CallerFields):
    inputs: str
    parameters: TGIParameters | None = None
    stream: bool | None = None


class LegacyParameters(CallerFields):
    do_sample: bool | None = None
    top_k: int | None = None
    top_p: float | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    return_full_text: bool | None = None
    return_protocol: str | None = None
    seed: int | None = None
    stop: str | list[str] | None = None


class LegacyRequest(CallerFields):
    inputs: str
    parameters: LegacyParameters | None = None
    stream: bool | None = None
