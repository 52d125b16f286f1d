"""Fields of protocol buffers as bytes (the encoding of Google's specification): numbers, and contents with a length."""

from __future__ import annotations


def varint(value: int) -> bytes:
    """A number of at least 0, seven bits a byte, the lowest first."""
    spelled = bytearray()
    while value >= 0x80:
        spelled.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*spelled, value])


def number(field: int, value: int) -> bytes:
    """A field that is a number."""
    return varint(field << 3) + varint(value)


def opening(field: int, length: int) -> bytes:
    """What stands before a content of so many bytes."""
    return varint(field << 3 | 2) + varint(length)


def content(field: int, data: bytes) -> bytes:
    """A field that is a text, bytes or a message."""
    return opening(field, len(data)) + data
