"""Write docs/reference/parameters.md from the tables of the code: `.venv/bin/python scripts/write_parameter_docs.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from llm_serving.core.generation_defaults import PARAMETERS
from llm_serving.core.sampling_params import DEFAULTS, RULES
from llm_serving.server.generation.sampling import REQUEST_RULES
from llm_serving.server.parsing.body import BODIES
from llm_serving.server.parsing.unsupported_fields import IgnoredField, RefusedField
from llm_serving.server.protocols.anthropic.schemas import MessagesRequest
from llm_serving.server.protocols.openai.models import meanings
from llm_serving.server.protocols.openai.responses_schemas import ResponsesRequest
from llm_serving.server.protocols.openai.schemas import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    ContentPart,
    StreamOptions,
)
from llm_serving.server.protocols.openai.vector_schemas import EmbeddingsRequest, RerankRequest, ScoreRequest
from llm_serving.server.protocols.text_schemas import LegacyParameters, LegacyRequest, TGIParameters, TGIRequest

FILE = Path(__file__).parents[1] / "docs" / "reference" / "parameters.md"
BEGINNING = f"""# Parameters of requests

Written by `scripts/write_parameter_docs.py` from the tables of the code; a test compares them.

A field of a request is honoured; or refused by name with status 400 (TGI and older routes: 422); or, if it cannot
change the answer, ignored and named in the header `x-ignored-parameters` of the response. An unknown field might change
the answer, so it is refused as well, with the nearest known name; only the older routes ignore and name it. null, an
empty list and an empty object have no effect. With an API key the tenant is the key's name, and a `user` in the body is
ignored and named.

Duplicates are refused by name: in a body, in an object within it, and among the headers `x-request-timeout-s`,
`Idempotency-Key` and `Last-Event-ID`. A route that does not use one of these headers names it as ignored.
`Content-Encoding` is refused, because bodies are not decompressed.

URLs follow the same rules. A parameter that a route does not know, or that occurs twice, is refused by name;
`api-version` and `beta`, which clients of other servers always send, are ignored and named; `/health`, `/ping` and
`/metrics` accept any parameter. Routes that read no body refuse a body with content.

Real numbers are rounded to float32, the precision of sampling, before they are checked: `top_p: 1e-46` is 0 and
refused. Every accepted value can be computed: no value of a parameter causes an error of the server.

Sampling applies, in this order: penalties, `logit_bias` with `bad_words` and `min_tokens`, `allowed_token_ids`,
`temperature`, `min_p`, `top_k`, `top_p`, the random draw.

- `bad_words` forbids the last token of a word after its other tokens, both in the tokenization at the start of a text
  and in that after a space. Other tokens can still produce the same text. The steps of such a request are not scheduled
  ahead.
- `allowed_token_ids` and `bad_words` that may forbid all tokens are refused.
- Structured output is described in [structured_output.md](../guides/structured_output.md).
- None of these can be combined with `use_beam_search`, which compares the model's own log-probabilities.
- `prompt_logprobs: k` returns for each prompt token, in vLLM's format, its log-probability, its rank and the `k` most
  likely tokens; `echo` with `logprobs` returns them in OpenAI's format before the generated tokens. The first token has
  none (null). They are the model's own, before temperature, penalties and bias, and are not streamed. A request has at
  most 524,288 of them over all prompts and answers. Such a prompt is computed even if its prefix is cached. With
  `max_tokens: 0` (completions) no token is generated.
- `text_offset` in the log-probabilities of a completion is the position of a token in `text`, in characters. Tokens
  without text, such as BOS, count no characters; all parts of one character have its offset.
- A conversation with `continue_final_message` continues its last message; with `echo` the answer starts with it.
- `max_completion_tokens` and `max_tokens` of a conversation are two names of one limit; if both are given, the smaller
  one applies.

A model folder may contain a `generation_config.json`. Its {", ".join(f"`{key}`" for key in PARAMETERS)} are defaults of
completions and conversations (`max_new_tokens`: of conversations only; completions have 16); other keys, such as
`do_sample`, have no effect. `model_config.generation_config: none` ignores the file. The TGI and the older routes have
defaults of their own.

`GET /v1/parameters` returns the table of sampling below as JSON, with the defaults of the served model and the request
classes that the client may use.
"""


def document() -> str:
    parts = [BEGINNING, "## Sampling\n", _table(("parameter", "default", "rule", "meaning"), _sampling_rows())]
    for title, kinds in (
        ("Completions", (CompletionRequest,)),
        ("Conversations", (ChatCompletionRequest,)),
        ("Responses", (ResponsesRequest,)),
        ("Anthropic messages", (MessagesRequest,)),
        ("Embeddings", (EmbeddingsRequest,)),
        ("Scores", (ScoreRequest,)),
        ("Rerank", (RerankRequest,)),
        ("TGI", (TGIRequest, TGIParameters)),
        ("Older routes", (LegacyRequest, LegacyParameters)),
    ):
        served = dict.fromkeys(each.encode_name for kind in kinds for each in msgspec.structs.fields(kind))
        parts += [f"## {title}\n", "Honoured: " + ", ".join(f"`{name}`" for name in sorted(served)) + ".\n"]
        parts.append(_table(("other field", "effect"), _other_rows(*kinds)))
    for title, kind in (
        ("Messages", ChatMessage),
        ("Parts of messages", ContentPart),
        ("`stream_options`", StreamOptions),
    ):
        parts += [f"## {title}\n", _table(("other field", "effect"), _other_rows(kind))]
    return "\n".join(parts)


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _sampling_rows() -> Iterator[tuple[str, ...]]:
    for name in RULES:
        rule = REQUEST_RULES[name].text
        yield f"`{name}`", f"`{DEFAULTS[name]!r}`" if name != "seed" else "drawn", rule, meanings()[name]


def _other_rows(*kinds: type) -> Iterator[tuple[str, ...]]:
    rows = {name: row for kind in kinds for name, row in BODIES[kind].rows.items()}
    for name, row in sorted(rows.items()):
        yield f"`{name}`", _effect(row)
    yield "any other", _effect(BODIES[kinds[0]].unknown)


def _effect(row: RefusedField | IgnoredField) -> str:
    if isinstance(row, IgnoredField):
        return f"ignored and named: {row.why}"
    neutral = [msgspec.json.encode(value).decode() for value in row.neutral if value not in ("", 0, False)]
    return f"refused: {row.why.removeprefix('is ')}" + (
        f" (but {', '.join(f'`{each}`' for each in neutral)})" if neutral else ""
    )


if __name__ == "__main__":
    FILE.write_text(document())
