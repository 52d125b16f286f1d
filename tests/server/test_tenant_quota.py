"""Stores shared by several tenants, and evictions."""

from __future__ import annotations

import pytest
from llm_serving.errors import RequestNotFoundError
from llm_serving.server.idempotency.store import AcceptedRequests
from llm_serving.server.protocols.openai.response_store import ResponseStore, StoredResponse
from llm_serving.server.protocols.openai.responses_schemas import ResponseObject
from llm_serving.server.protocols.openai.schemas import ChatMessage
from llm_serving.server.tenant_quota import StoredSizes, TenantQuota
from support.accepted_records import record


def kept(is_shared, *rows):
    found = StoredSizes(TenantQuota(100, lambda: is_shared))
    for name, tenant, size in rows:
        found.add(name, tenant, size)
    return found


def test_eviction_is_empty_while_there_is_room():
    assert kept(True, ("a", "me", 60)).evictions("you", 40) == []


def test_eviction_takes_the_oldest_without_tenants():
    found = kept(False, ("a", "me", 10), ("b", "you", 60), ("c", "you", 30))
    assert found.evictions("you", 5) == ["a"]
    assert found.evictions("you", 71) == ["a", "b", "c"]
    assert found.evictions("you", 101) is None


def test_eviction_takes_the_oldest_of_the_largest_tenant():
    found = kept(True, ("a", "me", 10), ("b", "you", 20), ("c", "you", 60), ("d", "me", 10))
    assert found.evictions("you", 5) == ["b"]
    assert found.evictions("me", 15) == ["b"]
    assert found.evictions("me", 45) == ["b", "a", "c"]


def test_eviction_recomputes_the_largest_tenant():
    found = kept(True, ("a", "me", 30), ("b", "you", 20), ("c", "you", 20), ("d", "you", 20))
    assert found.evictions("third", 60) is None, "it would have most itself"
    assert found.evictions("third", 35) == ["b", "c"]
    assert found.evictions("third", 29) == ["b"]


def test_removed_entries_leave_no_sizes():
    found = kept(True, ("a", "me", 30), ("b", "you", 20))
    for name in ("a", "b", "c"):
        found.remove(name)
    assert (found.num_bytes, found._own, found._of_tenant, found._all) == (0, {}, {}, {})


def responses(is_shared):
    store = ResponseStore(TenantQuota(3 * 5000, lambda: is_shared))

    def keep(name, tenant):
        response = ResponseObject(id=name, created_at=0, status="completed", model="demo")
        assert store.add(StoredResponse(response, tenant, [ChatMessage("user", "x")]))

    return store, keep


@pytest.mark.parametrize("is_shared", [False, True])
def test_stored_responses_do_not_evict_other_tenants(is_shared):
    store, keep = responses(is_shared)
    keep("mine", "me")
    for number in range(9):
        keep(f"yours-{number}", "you")
    if is_shared:
        assert store.find("mine", "me")
    else:
        with pytest.raises(RequestNotFoundError):
            store.find("mine", "me")
    assert store.find("yours-8", "you")


@pytest.mark.parametrize("is_shared", [False, True])
def test_recorded_requests_do_not_evict_other_tenants(is_shared):
    accepted = AcceptedRequests(TenantQuota(10_000, lambda: is_shared), 60.0, lambda: 1000.0, lambda: 0.0)
    accepted.restore(record(0, tenant="me"))
    for number in range(1, 30):
        accepted.restore(record(number, tenant="you"))
        assert accepted._sizes.num_bytes <= 10_000
    if is_shared:
        assert accepted.find("f", "stream-0", "me")
    else:
        with pytest.raises(RequestNotFoundError):
            accepted.find("f", "stream-0", "me")
    assert accepted.find("f", "stream-29", "you")


def test_responses_in_progress_leave_room_for_other_tenants():
    store, _ = responses(is_shared=True)

    def begin(name, tenant):
        response = ResponseObject(id=name, created_at=0, status="in_progress", model="demo")
        store.add_running(StoredResponse(response, tenant, [ChatMessage("user", "x")]))

    begin("a", "you")
    with pytest.raises(Exception, match="of one API key at most as many bytes as are free"):
        begin("b", "you")
    begin("c", "me")
