"""Who waits at the door, by address, and who loses a place there."""

from __future__ import annotations

import random

from llm_serving.server.front_door.waiting_row import WaitingRow


def test_those_of_an_address_are_taken_in_order():
    row = WaitingRow(9)
    assert [row.add("a", 1), row.add("b", 2), row.add("a", 3)] == [None] * 3
    assert [row.take("a"), row.take("a"), len(row)] == [1, 3, 1]
    assert ("a" in row, "b" in row) == (False, True)
    assert row.take_all() == [2]
    assert not row


def test_the_longest_row_loses_its_newest():
    row = WaitingRow(3)
    for number in range(3):
        row.add("a", number)
    assert row.add("b", 3) == ("a", 2)
    assert row.add("b", 4) == ("b", 4)  # no row is longer
    assert row.add("c", 5) == ("a", 1)
    assert row.add("d", 6) == ("d", 6)
    assert "d" not in row
    assert row.take_all() == [0, 3, 5]


def test_whoever_loses_a_place_is_of_a_longest_row():
    rng, row, lengths = random.Random(3), WaitingRow(20), dict.fromkeys("abcdefg", 0)
    for number in range(2000):
        address = rng.choice("aaabbcdefg")
        if rng.random() < 0.4 and address in row:
            row.take(address)
            lengths[address] -= 1
            continue
        lengths[address] += 1
        lost = row.add(address, number)
        assert (lost is not None) == (sum(lengths.values()) > 20)
        if lost is not None:
            assert lengths[lost[0]] == max(lengths.values())
            lengths[lost[0]] -= 1
        assert {each: size for each, size in lengths.items() if each in row} == {
            each: size for each, size in lengths.items() if size
        }
