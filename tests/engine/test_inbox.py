"""The inbox: order of messages, waking the reader, and the end after which no message is accepted."""

import os

import pytest
from llm_serving.engine.engine_requests import Inbox
from llm_serving.errors import WorkerDiedError


@pytest.fixture
def inbox():
    inbox = Inbox()
    yield inbox
    inbox.close("the test is over")


def test_inbox_handles_messages_in_order_including_new_ones(inbox):
    taken: list[str] = []
    inbox.post(lambda: (taken.append("first"), inbox.post(lambda: taken.append("third"))))
    inbox.post(lambda: taken.append("second"))
    assert len(inbox.messages) == 2
    inbox.handle()
    assert (taken, len(inbox.messages)) == (["first", "second", "third"], 0)


@pytest.mark.parametrize("wake", [lambda inbox: inbox.post(lambda: None), lambda inbox: inbox.wake()])
def test_inbox_wake_or_post_ends_one_wait(inbox, wake):
    wake(inbox)
    assert not inbox.wait(None, None)
    assert not inbox.wait(None, 0.0)


def test_inbox_wait_reports_another_descriptor_only_if_not_woken(inbox):
    other = os.eventfd(1)
    try:
        assert inbox.wait(other, None)
        inbox.wake()
        assert not inbox.wait(other, None)
    finally:
        os.close(other)


def test_ended_inbox_handles_earlier_messages_and_accepts_no_more(inbox):
    taken: list[str] = []
    inbox.post(lambda: taken.append("in time"))
    inbox.end("enough")
    inbox.end("another reason")
    with pytest.raises(WorkerDiedError, match="enough"):
        inbox.post(lambda: taken.append("late"))
    inbox.wake()
    inbox.handle()
    assert (taken, inbox.ended) == (["in time"], "enough")
