"""What a process may map, and which errors may come of that."""

from __future__ import annotations

import errno
import resource

import pytest
from llm_serving.core.memory import describe_address_space_limit, explain_address_space_limit


@pytest.fixture
def limit(monkeypatch):
    limit = [3_000_000_000]
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit[0], resource.RLIM_INFINITY))
    return limit


def test_a_limit_is_told_with_what_is_enough_and_what_to_do(limit):
    assert describe_address_space_limit() == (
        "a process may map 3.0 GB (`ulimit -v`, LimitAS of systemd): a WorkAgent needs 4 GB beside its weights and "
        "blocks; take the limit away (`ulimit -v unlimited`) or raise it"
    )


@pytest.mark.parametrize(
    ("error", "may_come_of_it"),
    [
        (RuntimeError("Allocate memory failed"), True),
        (RuntimeError("std::bad_alloc"), True),
        (ImportError("x.so: failed to map segment from shared object"), True),
        (RuntimeError("Resource temporarily unavailable"), True),
        (OSError(errno.ENOMEM, "x"), True),
        (MemoryError(), True),
        (RuntimeError("compile failed"), False),
    ],
)
def test_errors_that_may_come_of_it(limit, error, may_come_of_it):
    assert explain_address_space_limit(error) == (describe_address_space_limit() if may_come_of_it else None)


def test_without_a_limit_nothing_does(limit):
    limit[0] = resource.RLIM_INFINITY
    assert describe_address_space_limit() is explain_address_space_limit(MemoryError()) is None
