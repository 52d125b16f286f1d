"""Refusals under load, in virtual time: the delays of refused clients and their retries."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
from llm_serving.core.request_class import DEFAULT_CLASSES, Caller, RequestClass
from tools.refused_load import MAX_TOKENS, WARM_S, Client, World, at_once, capacity, outcome, shipped_clients, warm_up

SLOTS, MAX_WAITING, SECONDS = 32, 64, 3.0
FIRST_RETRY_SHARE = 0.7
"""Part of the clients that obey `Retry-After` and are admitted at their first retry, at least."""
MEDIAN_ERROR, P99_FACTOR = 0.25, 3.0
"""Required accuracy of the predicted time to first token of admitted requests."""


@cache
def most(slots: int = SLOTS) -> float:
    return capacity(num=10 * slots, slots=slots)


def at_twice_the_capacity(seed: int = 1, **changes) -> list[Client]:
    return [replace(client, **changes) for client in shipped_clients(2 * most(), SECONDS, seed)]


@cache
def world_at_twice_the_capacity() -> World:
    later = [replace(client, arrives=client.arrives + WARM_S) for client in at_twice_the_capacity()]
    world = World([*warm_up(most()), *later], slots=SLOTS, max_waiting=MAX_WAITING)
    world.run()
    return world


def test_clients_that_obey_retry_after_are_admitted_at_their_first_retry() -> None:
    world = world_at_twice_the_capacity()
    clients = [client for client in world.clients if client.arrives > WARM_S]
    result = outcome(clients)
    assert result.num_retried > len(clients) / 6, "the load is no competition"
    assert all(client.first_token is not None for client in clients)
    assert result.first_retry_share >= FIRST_RETRY_SHARE
    assert result.max_refusals <= 6
    assert world.most_waiting <= MAX_WAITING
    # The server was not idle for long: no `Retry-After` was much later than there was room.
    assert world.clock.now < WARM_S + 1.75 * len(clients) / most()


def test_predicted_ttft_of_admitted_requests_is_accurate_at_twice_the_capacity() -> None:
    result = outcome([client for client in world_at_twice_the_capacity().clients if client.arrives > WARM_S])
    assert result.accepted.num > 250
    assert result.accepted.median_error <= MEDIAN_ERROR and result.accepted.p99_factor <= P99_FACTOR
    assert result.returned.num > 50 and result.returned.median_error <= MEDIAN_ERROR


@pytest.mark.parametrize("max_tokens", [None, MAX_TOKENS])
def test_cold_server_admits_clients_at_their_first_retry(max_tokens: int | None) -> None:
    """Only 16 requests were served before the load, and those that finish first are the short ones."""
    clients = [*at_once(16), *shipped_clients(2 * most(), SECONDS, 1, start=WARM_S)]
    for client in clients:
        client.max_tokens = max_tokens
    World(clients, slots=SLOTS, max_waiting=MAX_WAITING).run()
    result = outcome(clients[16:])
    assert result.num_retried > 50 and result.first_retry_share >= FIRST_RETRY_SHARE
    # In its first second it takes the requests that finished first, which are short, for typical ones.
    assert result.accepted.median_error <= MEDIAN_ERROR and result.accepted.p99_factor <= 4.0
    assert result.returned.median_error <= 0.3


def test_idle_time_is_not_measured_as_a_step() -> None:
    """The step scheduled ahead of a stop token is not needed, and must not count until the next request."""
    first, second = (replace(client, max_tokens=MAX_TOKENS) for client in at_once(2))
    world, seconds = World([first, replace(second, arrives=10.0)], slots=SLOTS), []
    measure = world.engine.ttft_predictor.record_step

    def note(**step) -> None:
        seconds.append(step["seconds"])
        measure(**step)

    world.engine.ttft_predictor.record_step = note
    world.run()
    assert len(seconds) > 4 and max(seconds) < 0.1


def test_request_that_arrives_while_a_step_is_scheduled_is_not_predicted_to_join_it() -> None:
    clients = shipped_clients(0.6 * most(), 2.0, 1, start=WARM_S)
    World([*warm_up(most()), *clients], slots=SLOTS, max_waiting=MAX_WAITING, noise=0.0, schedule_s=0.003).run()
    accepted = outcome(clients).accepted
    assert accepted.num > 80 and accepted.median_error <= 0.1  # 0.22 if it is predicted to join
    assert accepted.p99_factor <= 1.4


@pytest.mark.parametrize("max_tokens", [None, MAX_TOKENS])
def test_predicted_ttft_is_accurate_with_few_running_slots(max_tokens: int | None) -> None:
    slots, max_waiting = 8, 32
    rate = most(slots)
    clients = [*warm_up(rate), *shipped_clients(2 * rate, 4.0, 1, start=WARM_S)]
    for client in clients:
        client.max_tokens = max_tokens
    World(clients, slots=slots, max_waiting=max_waiting).run()
    result = outcome([client for client in clients if client.arrives > WARM_S])
    assert result.first_retry_share >= FIRST_RETRY_SHARE
    assert result.accepted.num > 150
    # A single long answer decides when the next of few slots is free, so the tail is longer than with 32 slots.
    assert result.accepted.median_error <= MEDIAN_ERROR and result.accepted.p99_factor <= 5.0


def test_retries_do_not_overload_a_server_that_refusals_slow_down() -> None:
    """Each attempt takes 2 ms of the core that computes the steps, at three times the capacity."""
    clients = [*warm_up(most()), *shipped_clients(3 * most(), 2.0, 1, start=WARM_S)]
    world = World(clients, slots=SLOTS, max_waiting=MAX_WAITING, attempt_s=0.002)
    world.run()
    result = outcome([client for client in clients if client.arrives > WARM_S])
    assert result.num_retried > 200
    assert result.first_retry_share >= FIRST_RETRY_SHARE
    assert result.num_refusals < 1.5 * result.num_retried and result.max_refusals <= 6


def test_clients_that_never_retry_do_not_delay_others() -> None:
    deserters = [replace(c, source="10.0.0.66", obeys=False) for c in at_twice_the_capacity()]
    honest = shipped_clients(0.5 * most(), SECONDS, 7, first=100_000)
    world = World([*deserters, *honest], slots=SLOTS, max_waiting=MAX_WAITING)
    world.run()
    result = outcome(honest)
    assert all(client.first_token is not None for client in honest)
    assert result.first_retry_share >= FIRST_RETRY_SHARE
    # The server was busy throughout, as new requests took the queue slots of those that stayed away.
    in_time = sum(c.first_token is not None and c.first_token < SECONDS for c in (*deserters, *honest))
    assert in_time > 0.85 * most() * SECONDS


def test_clients_that_ignore_retry_after_do_not_exclude_others() -> None:
    """40 further clients of another address ask every tenth of a second until they are admitted."""
    honest = at_twice_the_capacity()
    world = World(honest, slots=SLOTS, max_waiting=MAX_WAITING)
    hammers = [replace(c, number=100_000 + c.number, source="10.0.0.66") for c in itertools.islice(honest, 40)]

    def hammer(client: Client) -> None:
        if client.admitted is None:
            num_refused = len(client.retry_afters_s)
            client.obeys = False
            world._ask(client)
            if len(client.retry_afters_s) > num_refused and world.clock.now < 2 * SECONDS:
                world.at(world.clock.now + 0.1, lambda: hammer(client))

    for client in hammers:
        world.at(1.0 + client.arrives, lambda client=client: hammer(client))
    world.run()
    assert outcome(honest).first_retry_share >= FIRST_RETRY_SHARE
    assert all(client.first_token is not None for client in honest)


def test_class_with_its_own_queue_limit_has_its_own_retry_schedule() -> None:
    clients = at_twice_the_capacity()
    for client in clients[::2]:
        client.caller = Caller(priority=1)
    world = World(
        clients, slots=SLOTS, max_waiting=MAX_WAITING, config={"request_classes": classes_with_batch_queue_limit(16)}
    )
    world.run()
    assert all(client.first_token is not None for client in clients)
    refused, others = outcome(clients[::2]), outcome(clients[1::2])
    assert refused.num_retried > 50 and refused.first_retry_share >= FIRST_RETRY_SHARE
    assert others.num_admitted_at_retry >= FIRST_RETRY_SHARE * others.num_retried


def classes_with_batch_queue_limit(max_waiting: int) -> tuple[RequestClass, ...]:
    return tuple(replace(each, max_waiting=max_waiting) if each.name == "batch" else each for each in DEFAULT_CLASSES)
