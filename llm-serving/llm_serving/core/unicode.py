"""Texts that UTF-8 has a form for: an escape of JSON or YAML, or the name of a file, may hold half a character."""

import json


def is_unicode(text: str) -> bool:
    """Whether it can be sent to another process, written to a file or told to a client."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def json_of(data: bytes) -> object:
    """A JSON text whose strings are all Unicode.

    Raises:
        ValueError: It is none.
        RecursionError: It is nested too deeply.
    """
    content: object = json.loads(data)
    if b"\\u" in data:
        json.dumps(content, ensure_ascii=False).encode()
    return content


def escaped(text: str) -> str:
    r"""The same, with what is no Unicode as an escape such as \udc80."""
    return text.encode("utf-8", "backslashreplace").decode()
