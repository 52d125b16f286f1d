"""Bodies of the TGI and of the older routes."""

from __future__ import annotations

from llm_serving.server.schemas import CallerFields, JsonObject


class TGIParameters(CallerFields):
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    """End-of-sequence ids cannot be sampled before this many tokens."""
    stop: str | list[str] | None = None
    stop_sequences: list[str] | None = None
    """An older name of `stop`."""
    seed: int | None = None
    truncate: int | None = None
    """Keep this many tokens from the end of the prompt."""
    return_full_text: bool | None = None
    details: bool | None = None
    top_n_tokens: int | None = None
    grammar: JsonObject | None = None
    """The form of the answer: `type` is json, json_schema or regex, `value` the schema or expression."""


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
