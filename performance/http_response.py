"""Reads one HTTP/1.1 response from bytes that come in any portions."""

from collections.abc import Callable


class HttpError(Exception):
    """The exchange failed below HTTP: no connection, a broken or silent one, or bytes that are not HTTP/1.1."""


class ResponseParser:
    """Turns the bytes of one HTTP/1.1 response, split anywhere, into its body: chunked, counted, or until the close."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self._buffer = bytearray()
        self._body = bytearray()
        self._remaining = 0
        self._read: Callable[[], bool] = self._read_head

    def feed(self, data: bytes) -> bytes:
        """Takes bytes from the wire and returns the body bytes they completed.

        Raises:
            HttpError: The bytes are not an HTTP/1.1 response.
        """
        self._buffer += data
        while not self.complete and self._read():
            pass
        body = bytes(self._body)
        self._body.clear()
        return body

    def feed_eof(self) -> None:
        """Tells that the server closed the connection.

        Raises:
            HttpError: The response was not complete.
        """
        if self._read == self._read_until_close:
            self.complete = True
        elif not self.complete:
            where = "inside the body" if self.status else "before the response"
            raise HttpError(f"the server closed the connection {where}")

    def _take_line(self) -> bytes | None:
        end = self._buffer.find(b"\n")
        if end < 0:
            return None
        line = bytes(self._buffer[:end]).rstrip(b"\r")
        del self._buffer[: end + 1]
        return line

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        status_line, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        version, _, rest = status_line.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise HttpError(f"not an HTTP/1.1 response: {status_line[:80]!r}")
        if rest[0] == "1":  # an interim response; the real one follows
            return True
        self.status = int(rest[:3])
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._read = self._read_chunk_size
        elif "content-length" in self.headers:
            self._remaining = _length(self.headers["content-length"], 10)
            self._read = self._read_counted
        else:
            self._read = self._read_until_close
        return True

    def _read_chunk_size(self) -> bool:
        line = self._take_line()
        if line is None:
            return False
        self._remaining = _length(line.partition(b";")[0].decode("latin-1"), 16)
        self._read = self._read_chunk if self._remaining else self._read_trailer
        return True

    def _read_chunk(self) -> bool:
        if not self._take_body():
            return False
        self._read = self._read_chunk_end
        return True

    def _read_chunk_end(self) -> bool:
        if self._take_line() is None:
            return False
        self._read = self._read_chunk_size
        return True

    def _read_trailer(self) -> bool:
        line = self._take_line()
        self.complete = line == b""
        return line is not None

    def _read_counted(self) -> bool:
        self.complete = self._take_body()
        return False

    def _read_until_close(self) -> bool:
        self._body += self._buffer
        self._buffer.clear()
        return False

    def _take_body(self) -> bool:
        """Moves what is there of the `_remaining` bytes to the body; True once all of them have come."""
        data = self._buffer[: self._remaining]
        del self._buffer[: len(data)]
        self._body += data
        self._remaining -= len(data)
        return self._remaining == 0


def _length(text: str, base: int) -> int:
    try:
        length = int(text, base)
    except ValueError:
        length = -1
    if length < 0:
        raise HttpError(f"not a length: {text[:80]!r}")
    return length
