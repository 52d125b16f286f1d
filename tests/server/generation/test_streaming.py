"""Event ids, and streams that resume after one."""

from __future__ import annotations

import asyncio

import pytest
from llm_serving.errors import RequestError
from llm_serving.server.generation.response import NumberedPieces
from llm_serving.server.idempotency.request import BEGINNING, Position


class Pieces:
    """Two events for each piece; two at the end."""

    def chunk(self, index, output):
        return b"" if output is None else f"data: {index}{output}\n\ndata: {index}{output}'\n\n".encode()

    async def finish(self):
        return b"data: usage\n\ndata: [DONE]\n\n"


def events_of(order, position=BEGINNING, num_choices=2) -> list[tuple[str, str]]:
    """Return (id, data) of every event."""
    pieces, number = NumberedPieces(Pieces(), "s", num_choices, position), [0] * num_choices
    text = b""
    for index in order:
        number[index] += 1
        text += pieces.chunk(index, number[index])
    text += pieces.chunk(0, None) + asyncio.run(pieces.finish())
    events = text.decode().split("\n\n")
    assert events.pop() == ""
    return [tuple(line.partition(": ")[2] for line in event.split("\n")) for event in events]


def test_resumable_stream_events_have_ids():
    assert events_of([0, 1, 0]) == [
        ("s:1.0", "01"),
        ("s:2.0", "01'"),
        ("s:2.1", "11"),
        ("s:2.2", "11'"),
        ("s:3.2", "02"),
        ("s:4.2", "02'"),
        ("s:4.2+1", "usage"),
        ("s:4.2+end", "[DONE]"),
    ]


def test_resumable_stream_resumes_after_each_event():
    whole = events_of([0, 1, 0, 1, 1])
    for place, (event_id, _) in enumerate(whole):
        position = Position.read("f", event_id.partition(":")[2])
        again = events_of([1, 1, 0, 1, 0], position)
        seen = [data for _, data in whole[: place + 1]] + [data for _, data in again]
        if position.is_end:
            continue
        assert sorted(seen) == sorted(data for _, data in whole)
        for choice in "01":
            own = [data for data in seen if data[0] == choice]
            assert own == [data for _, data in whole if data[0] == choice]
        assert again[-1][0] == whole[-1][0]


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("0", Position((0,))),
        ("12.7", Position((12, 7))),
        ("3+1", Position((3,), 1)),
        ("3.4+end", Position((3, 4), 0, True)),
    ],
)
def test_event_position_is_parsed(text, position):
    assert Position.read("f", text) == position._replace(field="f", text=text)


@pytest.mark.parametrize("text", ["x", "1.", "-1", "1e3", "01", "9" * 12, "1+x", "+1", ".".join(["1"] * 17), "1 ", "١"])
def test_invalid_event_position_is_refused(text):
    with pytest.raises(RequestError, match="Last-Event-ID"):
        Position.read("Last-Event-ID", text)


def test_event_position_of_other_choices_is_refused():
    with pytest.raises(RequestError, match="2 choices"):
        Position((1,)).check(2)


@pytest.mark.parametrize("position", [Position((3, 0)), Position((2, 1)), Position((2, 0), 2)])
def test_event_position_after_the_last_event_is_refused(position):
    with pytest.raises(RequestError, match="must not be after the last event"):
        events_of([0], position)
