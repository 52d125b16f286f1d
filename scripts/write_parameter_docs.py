"""Writes docs/reference/parameters.md from the tables of the code.

Run `.venv/bin/python scripts/write_parameter_docs.py` after a change of a parameter.
"""

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

A field of a request is honoured, or refused by name with status 400 (TGI and older routes: 422), or ignored, if it
cannot change the answer, and named in the header `x-ignored-parameters` of the answer. A field that nobody has heard of
might change the answer, so it is refused too, with the name that may have been meant; only the older routes ignore
and name it. null, an empty list and an empty object ask for nothing. With an API key the tenant is the key's name, and
a `user` beside it is ignored and named.

What is given twice is refused by name, in a body, in an object within it, and of the headers `x-request-timeout-s`,
`Idempotency-Key` and `Last-Event-ID`: whichever counted, the other one would be ignored. A route that does not heed one
of these headers names it as ignored. `Content-Encoding` is refused: bodies are read as they come.

The same holds beside the fields of a body. A parameter in the URL that a route does not know, or the same one twice, is
refused by name; `api-version` and `beta`, which clients of other servers send each time, are ignored and named;
`/health`, `/ping` and `/metrics` may have anything there. Routes that read no body refuse one that says something.

Real numbers are rounded to float32, in which tokens are chosen, and checked then: `top_p: 1e-46` is 0 and refused. What
passes is computed: no value of a parameter ends in an error of the server.

The order in which a token is chosen: penalties, `logit_bias` with `bad_words` and `min_tokens`, `allowed_token_ids`,
`temperature`, `min_p`, `top_k`, `top_p`, the draw.

- `bad_words` forbids the last token of a word behind its other ones, in the tokens that the text has at a beginning and
  behind a space; the same text can still come about from other tokens. Such a request is not computed a step ahead.
- `allowed_token_ids` and `bad_words` that may leave no token to sample are refused.
- An answer may be bound to a form: [structured_output.md](../guides/structured_output.md).
- None of these goes with `use_beam_search`, which compares the model's own log-probabilities.
- `prompt_logprobs: k` tells of each token of the prompt, in the form of vLLM, its log-probability, its rank and the `k`
  most likely tokens; `echo` with `logprobs` tells the same in the form of OpenAI, before what is generated. The first
  token has none (null). They are those of the model itself, before temperature, penalties and bias, and are not
  streamed; all prompts and answers of a request have at most 524,288 of them. Such a prompt is computed even where
  another request has computed its beginning. With `max_tokens: 0` (completions) nothing follows it.
- `text_offset` of a completion's log-probabilities is where a token begins in `text`, in characters; tokens that are no
  text, such as the one that begins a sequence, take none; parts of a character all begin where it does.
- A conversation with `continue_final_message` goes on with its last message; with `echo` the answer begins with it.
- `max_completion_tokens` and `max_tokens` of a conversation are two names of one limit; of both the smaller one counts.

The folder of a model may hold a `generation_config.json`. {", ".join(f"`{key}`" for key in PARAMETERS)} of it are what
completions and conversations have that say nothing (`max_new_tokens`: conversations alone, as completions have 16);
other keys, `do_sample` among them, have no effect. `model_config.generation_config: none` leaves all of it out. The TGI
and the older routes have defaults of their own.

`GET /v1/parameters` tells the table of sampling below as programs read it, with the defaults of the model that is
served, and the classes that who asks may ask for.
"""


def document() -> str:
    """The whole file."""
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
        parts.append(_table(("other field", "what becomes of it"), _other_rows(*kinds)))
    for title, kind in (
        ("Messages", ChatMessage),
        ("Parts of messages", ContentPart),
        ("`stream_options`", StreamOptions),
    ):
        parts += [f"## {title}\n", _table(("other field", "what becomes of it"), _other_rows(kind))]
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
        yield f"`{name}`", _fate(row)
    yield "any other", _fate(BODIES[kinds[0]].unknown)


def _fate(row: RefusedField | IgnoredField) -> str:
    if isinstance(row, IgnoredField):
        return f"ignored and named: {row.why}"
    neutral = [msgspec.json.encode(value).decode() for value in row.neutral if value not in ("", 0, False)]
    return f"refused: {row.why.removeprefix('is ')}" + (
        f" (but {', '.join(f'`{each}`' for each in neutral)})" if neutral else ""
    )


if __name__ == "__main__":
    FILE.write_text(document())
