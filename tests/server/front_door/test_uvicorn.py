"""What the front door takes for granted of uvicorn: its code, as it was when both were read together."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect

import pytest
from uvicorn.protocols.http import flow_control, httptools_impl
from uvicorn.server import Server

VERSION = "0.54.0"
READ = {
    "protocol": (httptools_impl, "1d4e1c579df4168433a61a01f10c628b31c1790e72dd9769d2b8633b22214033"),
    "flow control": (flow_control, "d39d16560df512f3ce907c329c2a0c3f5cd7165fef3b753876eae5739bf2a785"),
    "startup": (Server.startup, "2aa1d70a244bfcf21a1ae57e0152f9c20e40f756ffc328ccc58037f6ae8e2dfc"),
    "shutdown": (Server.shutdown, "9b33c50562992b1e3cef2a9611408ece6c01d46ee17eaae2091b6091bf826eab"),
}
"""Code that is derived from or replaced -> SHA-256 of its text."""


def test_the_version_is_the_one_that_was_read():
    assert importlib.metadata.version("uvicorn") == VERSION


@pytest.mark.parametrize("name", READ)
def test_the_code_is_the_one_that_was_read(name):
    """When this fails: read the difference beside `connection.py` and `http_server.py`, then note the hash."""
    code, expected = READ[name]
    assert hashlib.sha256(inspect.getsource(code).encode()).hexdigest() == expected
