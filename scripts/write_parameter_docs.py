"""Write docs/reference/parameters.md from the tables of the code.

.venv/bin/python scripts/write_parameter_docs.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from llm_serving.core.sampling_params import DEFAULTS, PARAMETERS, RULES
from llm_serving.server.generation.sampling import REQUEST_RULES
from llm_serving.server.parsing.unsupported_fields import ANY_OTHER, UNKNOWN, UNSUPPORTED, IgnoredField, RefusedField
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

A field of a request has one of three fates:

- it is honoured;
- it is refused by name with status 400 (TGI and older routes: 422);
- it is ignored, if it cannot change the answer, and named in the header `x-ignored-parameters` of the answer.

An unknown field might change the answer, so it is refused too, with the name that may have been meant. Only the older
routes ignore and name it. null, an empty list and an empty object count as not given. With an API key the tenant is
the key's name, and a `user` beside it is ignored and named.

Anything given twice is refused by name: a field of a body or of an object in it, a parameter in the URL, and the
headers `x-request-timeout-s`, `Idempotency-Key` and `Last-Event-ID`. A route that does not use one of these headers
names it as ignored. `Content-Encoding` is refused. An unknown parameter in the URL is refused; `api-version` and
`beta` are ignored and named, and `/health`, `/ping` and `/metrics` accept any. A route without a body refuses one.

Real numbers are rounded to float32 and then checked: `top_p: 1e-46` is 0 and refused.

A token is chosen in this order: penalties, `logit_bias` with `bad_words` and `min_tokens`, `allowed_token_ids`,
`temperature`, `min_p`, `top_k`, `top_p`, the draw.

- `bad_words` forbids the last token of a word after its other tokens, in the tokens that the word has at the
  beginning of a text and after a space. The same text can still come from other tokens.
- `allowed_token_ids` and `bad_words` that may leave no token to choose are refused.
- An answer may be bound to a form: [structured_output.md](../guides/structured_output.md).
- None of these goes with `use_beam_search`, which compares the model's own log-probabilities.
- `prompt_logprobs: k` returns for each token of the prompt its log-probability, its rank and the `k` most likely
  tokens, in the form of vLLM. `echo` with `logprobs` returns the same in the form of OpenAI. The first token has none
  (null). They are those of the model, before temperature, penalties and bias, and are not streamed. All prompts and
  answers of a request have at most 524,288 of them. Such a prompt is computed even where its prefix is cached. With
  `max_tokens: 0` (completions) nothing follows it.
- `text_offset` of a completion's log-probabilities is the position of a token in `text`, in characters. Tokens that
  are no text, such as the one that begins a sequence, have no length; the parts of a character all begin where it
  does.
- A conversation with `continue_final_message` continues its last message; with `echo` the answer begins with it.
- `max_completion_tokens` and `max_tokens` of a conversation are two names of one limit; of both the smaller one
  counts.

A model folder may have a `generation_config.json`. Its {", ".join(f"`{key}`" for key in PARAMETERS)}
are the defaults of completions and conversations (`max_new_tokens`: of conversations only, because completions have
16). Other keys, `do_sample` among them, have no effect. `model_config.generation_config: none` ignores the file. TGI
and the older routes have defaults of their own.

`GET /v1/parameters` returns the table of sampling below, with the defaults of the served model and the classes that
the caller may use.
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
        parts.append(_table(("other field", "fate"), _other_rows(*kinds)))
    for title, kind in (
        ("Messages", ChatMessage),
        ("Parts of messages", ContentPart),
        ("`stream_options`", StreamOptions),
    ):
        parts += [f"## {title}\n", _table(("other field", "fate"), _other_rows(kind))]
    return "\n".join(parts)


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _sampling_rows() -> Iterator[tuple[str, ...]]:
    for name in RULES:
        rule = REQUEST_RULES[name].text
        yield f"`{name}`", f"`{DEFAULTS[name]!r}`" if name != "seed" else "drawn", rule, meanings()[name]


def _other_rows(*kinds: type) -> Iterator[tuple[str, ...]]:
    rows = {name: row for kind in kinds for name, row in UNSUPPORTED[kind].items()}
    any_other = rows.pop(ANY_OTHER, UNKNOWN)
    for name, row in sorted(rows.items()):
        yield f"`{name}`", _effect(row)
    yield "any other", _effect(any_other)


def _effect(row: RefusedField | IgnoredField) -> str:
    if isinstance(row, IgnoredField):
        return f"ignored and named: {row.why}"
    neutral = [msgspec.json.encode(value).decode() for value in row.neutral if value not in ("", 0, False)]
    return f"refused: {row.why.removeprefix('is ')}" + (
        f" (but {', '.join(f'`{each}`' for each in neutral)})" if neutral else ""
    )


if __name__ == "__main__":
    FILE.write_text(document())
