"""The texts of a field that holds one or several, each a text or its token ids."""

from __future__ import annotations

from llm_serving.errors import RequestError
from llm_serving.server.off_loop import INLINE_ITEMS, off_loop

Given = str | list[str | int | list[int]]
Item = str | list[int]


async def prompt_items(given: Given, field: str, most: int, what: str) -> list[Item]:
    """One item for each text; many are looked at beside the event loop.

    Args:
        given: The field's value.
        field: Its name.
        most: Items that it may hold.
        what: They are.

    Raises:
        RequestError: The list is empty, mixes kinds or holds too many.
    """
    return await off_loop(len(given) > INLINE_ITEMS, lambda: _items(given, field, most, what))


def _items(given: Given, field: str, most: int, what: str) -> list[Item]:
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    if len(ids) == len(given) > 0:
        return [ids]
    items = [item for item in given if isinstance(item, str | list)]
    if ids or not items or len({type(item) for item in items}) > 1:
        raise RequestError(field, "must be a text, a list of texts, token ids or a list of lists of token ids")
    if len(items) > most:
        raise RequestError(field, f"must hold at most {most} {what}", len(items))
    return items
