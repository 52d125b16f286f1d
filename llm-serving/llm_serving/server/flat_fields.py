"""Fields that chat keeps in an object of their own and other protocols do not: a function's, and a JSON schema's."""

from __future__ import annotations

from llm_serving.errors import RequestError
from llm_serving.server.schemas import JsonObject


def nested_schema(form: JsonObject) -> JsonObject:
    """`response_format` of chat for a flat form of type json_schema."""
    return {"type": "json_schema", "json_schema": {name: each for name, each in form.items() if name != "type"}}


def flat_error(error: RequestError, form: str) -> RequestError:
    """An error of chat by the names of flat fields; other fields keep theirs.

    Args:
        error: Of chat.
        form: The field that stands for `response_format`.
    """
    if error.field.startswith("tools["):
        return error.renamed(error.field.replace(".function.", "."))
    if error.field.startswith("response_format"):
        inner = error.field.removeprefix("response_format").removeprefix(".json_schema")
        return error.renamed(f"{form}{inner}")
    return error
