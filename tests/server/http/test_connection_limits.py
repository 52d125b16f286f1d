"""Connection limits: admission, closing of idle connections, and refusals because of buffered bytes."""

from __future__ import annotations

import pytest
from llm_serving.server.http.acceptor import MAX_RETRY_AFTER_S, ConnectionLimits, network_of


class Connection:
    def __init__(self, address="a", busy=False, unread=False):
        self.address = address
        self.is_busy = busy
        self.has_unread = unread
        self.weight = 0
        self.ended = False

    def abort(self):
        self.ended = True

    def refuse(self, refusal):
        self.ended = True


def limits_of(max_connections, max_per_address, max_bytes=100):
    return ConnectionLimits(max_connections, max_per_address, max_bytes, lambda address, status: None)


def admitted(limits, *those):
    assert all(limits.admit(each) for each in those)
    return list(those)


class TestConnections:
    def test_connection_is_refused_while_all_are_busy(self):
        limits = limits_of(2, 2)
        admitted(limits, Connection(busy=True), Connection("b", busy=True))
        assert not limits.admit(Connection("c"))
        assert len(limits) == 2

    def test_oldest_idle_connection_is_closed(self):
        limits = limits_of(3, 3)
        busy, old, young = admitted(limits, Connection(busy=True), Connection(), Connection())
        assert limits.admit(Connection("b"))
        assert [busy.ended, old.ended, young.ended] == [False, True, False]
        assert len(limits) == 3

    def test_idle_connection_of_the_largest_address_is_closed_first(self):
        limits = limits_of(3, 3)
        alone, first, second = admitted(limits, Connection("b"), Connection(), Connection())
        assert limits.admit(Connection("c"))
        assert [alone.ended, first.ended, second.ended] == [False, True, False]

    def test_idle_connection_of_another_address_is_closed_if_the_largest_is_busy(self):
        limits = limits_of(3, 3)
        *_, idle = admitted(limits, Connection(busy=True), Connection(busy=True), Connection("b"))
        assert limits.admit(Connection("c"))
        assert idle.ended

    def test_connections_per_address_are_limited(self):
        limits = limits_of(10, 2)
        admitted(limits, Connection(busy=True), Connection(busy=True), Connection("b"))
        assert not limits.admit(Connection())
        assert limits.admit(Connection("b"))

    def test_connection_with_unread_bytes_is_not_closed(self):
        limits = limits_of(4, 2)
        waiting = admitted(limits, Connection(unread=True), Connection(unread=True))
        assert not limits.admit(Connection())
        assert not any(each.ended for each in waiting)

    def test_large_address_does_not_evict_smaller_ones(self):
        limits = limits_of(3, 9)
        *_, alone = admitted(limits, Connection(busy=True), Connection(busy=True), Connection("b"))
        assert not limits.admit(Connection())
        assert not alone.ended

    def test_removed_connection_is_not_counted(self):
        limits = limits_of(1, 1)
        (connection,) = admitted(limits, Connection(busy=True))
        limits.remove(connection)
        limits.remove(connection)
        assert limits.admit(Connection())
        assert len(limits) == 1

    def test_reloaded_limits_apply_to_new_connections(self):
        limits = limits_of(1, 1)
        admitted(limits, Connection(busy=True))
        limits.reload(2, 2, 100)
        assert limits.admit(Connection())

    def test_retry_after_has_jitter(self):
        limits = limits_of(1, 1)
        assert {limits.retry_after_s() for _ in range(500)} == set(range(1, MAX_RETRY_AFTER_S + 1))


class TestBytes:
    def test_largest_buffer_is_refused_first(self):
        limits = limits_of(9, 9)
        small, large, last = admitted(limits, Connection(), Connection(), Connection())
        limits.weigh(small, 30)
        limits.weigh(large, 60)
        assert not large.ended
        limits.weigh(last, 20)
        assert [small.ended, large.ended, last.ended] == [False, True, False]
        assert limits.num_bytes == 50

    def test_released_bytes_are_not_counted(self):
        limits = limits_of(9, 9)
        first, second = admitted(limits, Connection(), Connection())
        limits.weigh(first, 90)
        limits.weigh(first, 0)
        limits.weigh(second, 90)
        assert not (first.ended or second.ended)

    def test_removed_connection_buffers_nothing(self):
        limits = limits_of(9, 9)
        (connection,) = admitted(limits, Connection())
        limits.weigh(connection, 90)
        limits.remove(connection)
        limits.weigh(connection, 50)
        assert limits.num_bytes == 0


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_ipv6_addresses_are_grouped_by_their_network(host, address):
    assert network_of(host) == address
