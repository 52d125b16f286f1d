"""Who gets a place, who makes room, and who goes for the bytes held."""

from __future__ import annotations

import pytest
from llm_serving.server.front_door.guests import SEARCH_PAUSE_S, Guests, address_of


class Guest:
    def __init__(self, address="a", served=False, heard=True, idle=False):
        self.address = address
        self.is_served = served
        self.is_heard = heard
        self.is_idle = idle
        self.weight = 0
        self.ended = False

    def end(self):
        self.ended = True

    unburden = end


def admitted(guests, *those):
    assert all(guests.admit(guest) for guest in those)
    return list(those)


class TestPlaces:
    def test_there_is_no_place_while_all_are_served(self):
        guests = Guests(2, 2, 100)
        admitted(guests, Guest(served=True), Guest("b", served=True))
        assert not guests.admit(Guest("c"))
        assert len(guests) == 2

    def test_the_oldest_that_waits_makes_room(self):
        guests = Guests(3, 3, 100)
        served, old, young = admitted(guests, Guest(served=True), Guest(), Guest())
        assert guests.admit(Guest("b"))
        assert [served.ended, old.ended, young.ended] == [False, True, False]
        assert len(guests) == 3

    def test_the_most_numerous_address_goes_first(self):
        guests = Guests(3, 3, 100)
        alone, first, second = admitted(guests, Guest("b"), Guest("a"), Guest("a"))
        assert guests.admit(Guest("c"))
        assert [alone.ended, first.ended, second.ended] == [False, True, False]

    def test_others_make_room_where_the_most_numerous_are_all_served(self):
        guests = Guests(3, 3, 100)
        *_, idle = admitted(guests, Guest("a", served=True), Guest("a", served=True), Guest("b"))
        assert guests.admit(Guest("c"))
        assert idle.ended

    def test_an_address_has_its_own_limit(self):
        guests = Guests(10, 2, 100)
        admitted(guests, Guest("a", served=True), Guest("a", served=True), Guest("b"))
        assert not guests.admit(Guest("a"))
        assert guests.admit(Guest("b"))

    def test_a_place_is_free_again_when_somebody_leaves(self):
        guests = Guests(1, 1, 100)
        (guest,) = admitted(guests, Guest(served=True))
        guests.leave(guest)
        guests.leave(guest)
        assert guests.admit(Guest())
        assert len(guests) == 1

    def test_nobody_who_was_not_heard_yet_goes_for_another_of_its_own_address(self):
        guests = Guests(4, 2, 100)
        crowd = admitted(guests, Guest(heard=False), Guest(heard=False))
        assert not guests.admit(Guest())
        assert not any(each.ended for each in crowd)

    def test_those_not_heard_yet_keep_no_other_address_out(self):
        guests = Guests(3, 3, 100)
        first, second, heard = admitted(guests, Guest(heard=False), Guest(heard=False), Guest("b"))
        (newcomer,) = admitted(guests, Guest("c"))
        assert [first.ended, second.ended, heard.ended] == [False, False, True]
        newcomer.is_served = True
        assert not guests.admit(Guest("a"))
        assert guests.admit(Guest("d"))
        assert [first.ended, second.ended] == [True, False]

    def test_a_crowd_of_which_nobody_is_heard_takes_no_place_of_fewer(self):
        """A handshake between two flights is heard; hundreds of others have sent their first and wait for a turn."""
        guests = Guests(5, 9, 100)
        *_, alone = admitted(guests, *(Guest(address, heard=False) for address in "aacc"), Guest("b"))
        assert not guests.admit(Guest("a"))
        assert not guests.admit(Guest("c"))
        assert not alone.ended

    def test_the_idle_make_room_for_anybody(self):
        guests = Guests(4, 9, 100)
        *_, busy, idle = admitted(guests, *(Guest(served=True) for _ in range(2)), Guest("b"), Guest("c", idle=True))
        admitted(guests, Guest(served=True))
        assert [busy.ended, idle.ended] == [False, True]
        assert not guests.admit(Guest())

    def test_those_who_are_all_served_are_not_looked_at_for_each_who_comes(self):
        looks, now = [], [0.0]

        class Served(Guest):
            @property
            def is_served(self):
                looks.append(self)
                return True

            @is_served.setter
            def is_served(self, value):
                pass

        guests = Guests(9, 3, 100, clock=lambda: now[0])
        admitted(guests, Served(), Served(), Served())
        assert not any(guests.admit(Guest()) for _ in range(100))
        assert len(looks) == 3
        now[0] += SEARCH_PAUSE_S
        assert not guests.admit(Guest())
        assert len(looks) == 6

    def test_no_address_pauses_the_search_for_others(self):
        guests = Guests(3, 9, 100, clock=lambda: 0.0)
        crowd = admitted(guests, *(Guest(heard=False) for _ in range(3)))
        assert not guests.admit(Guest())
        assert guests.admit(Guest("b"))
        assert [each.ended for each in crowd] == [True, False, False]

    def test_who_finds_no_place_is_told_a_later_time_than_the_one_before(self):
        now = [0.0]
        guests = Guests(99, 8, 100, clock=lambda: now[0])
        admitted(guests, *(Guest(served=True) for _ in range(7)))
        for number in range(20):  # ten a second
            now[0] = number / 10
            (guest,) = admitted(guests, Guest(served=True))
            guests.leave(guest)
        told = [guests.seconds_to_comeback("a") for _ in range(40)]
        assert told == sorted(told)
        assert told[0] == 1
        assert 3 <= told[-1] <= 14
        assert max(guests.seconds_to_comeback("a") for _ in range(3000)) == 120
        assert guests.seconds_to_comeback("b") == 1

    def test_strangers_are_told_by_the_rate_at_which_strangers_find_places(self):
        now = [0.0]
        guests = Guests(8, 8, 100, clock=lambda: now[0])
        here = admitted(guests, *(Guest(f"10.0.0.{number}", served=True) for number in range(8)))
        for number in range(20):  # ten a second
            now[0] = number / 10
            guests.leave(here.pop(0))
            here += admitted(guests, Guest(f"10.0.1.{number}", served=True))
        told = [guests.seconds_to_comeback(f"10.0.2.{number}") for number in range(40)]
        assert told == sorted(told)
        assert 3 <= told[-1] <= 14

    def test_several_make_room_at_once_where_there_are_many(self):
        guests = Guests(64, 64, 100)
        crowd = admitted(guests, *(Guest() for _ in range(64)))
        assert guests.admit(Guest("b"))
        assert [guest.ended for guest in crowd] == [True] * 2 + [False] * 62


class TestBytes:
    def test_whoever_holds_most_goes(self):
        guests = Guests(9, 9, 100)
        small, large, last = admitted(guests, Guest(), Guest(), Guest())
        guests.weigh(small, 30)
        guests.weigh(large, 60)
        assert not large.ended
        guests.weigh(last, 20)
        assert [small.ended, large.ended, last.ended] == [False, True, False]
        assert guests.num_bytes == 50

    def test_what_was_handed_over_no_longer_counts(self):
        guests = Guests(9, 9, 100)
        first, second = admitted(guests, Guest(), Guest())
        guests.weigh(first, 90)
        guests.weigh(first, 0)
        guests.weigh(second, 90)
        assert not (first.ended or second.ended)

    def test_who_leaves_holds_nothing(self):
        guests = Guests(9, 9, 100)
        (guest,) = admitted(guests, Guest())
        guests.weigh(guest, 90)
        guests.leave(guest)
        guests.weigh(guest, 50)
        assert guests.num_bytes == 0


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("10.1.2.3", 5), "10.1.2.3"),
        (("::ffff:10.1.2.3", 5, 0, 0), "10.1.2.3"),
        (("2001:db8:1:2:3:4:5:6", 5, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::/64"),
        ("", ""),
    ],
)
def test_what_counts_as_one_address(peer, address):
    assert address_of(peer) == address
