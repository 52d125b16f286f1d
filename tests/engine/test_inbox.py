"""The inbox: messages in their order, a reader that is woken, and an end after which nothing is taken."""

import os

import pytest
from llm_serving.engine.inbox import Inbox
from llm_serving.errors import WorkerDiedError


@pytest.fixture
def inbox():
    inbox = Inbox()
    yield inbox
    inbox.close("the test is over")


def test_messages_are_taken_in_their_order_those_included_that_come_meanwhile(inbox):
    taken: list[str] = []
    inbox.post(lambda: (taken.append("first"), inbox.post(lambda: taken.append("third"))))
    inbox.post(lambda: taken.append("second"))
    assert len(inbox) == 2
    inbox.take()
    assert (taken, len(inbox)) == (["first", "second", "third"], 0)


@pytest.mark.parametrize("wake", [lambda inbox: inbox.post(lambda: None), lambda inbox: inbox.wake()])
def test_whoever_wakes_the_reader_ends_its_next_wait_once(inbox, wake):
    wake(inbox)
    assert not inbox.wait(None, None)
    assert not inbox.wait(None, 0.0)


def test_another_descriptor_is_told_of_only_where_nobody_woke_the_reader(inbox):
    other = os.eventfd(1)
    try:
        assert inbox.wait(other, None)
        inbox.wake()
        assert not inbox.wait(other, None)
    finally:
        os.close(other)


def test_after_its_end_it_takes_what_has_come_and_no_more(inbox):
    taken: list[str] = []
    inbox.post(lambda: taken.append("in time"))
    inbox.end("enough")
    inbox.end("another reason")
    with pytest.raises(WorkerDiedError, match="enough"):
        inbox.post(lambda: taken.append("late"))
    inbox.wake()
    inbox.take()
    assert (taken, inbox.ended) == (["in time"], "enough")
