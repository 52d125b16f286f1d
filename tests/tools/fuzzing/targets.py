"""The targets: functions of bytes. Any exception except the documented errors is a finding."""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
from llm_serving.config.loader import load_config
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.core.timings import HttpTimings
from llm_serving.errors import ChannelClosedError, ConfigError, ModelError, ProtocolError, RequestError
from llm_serving.models.weight_reader import WeightReader
from llm_serving.server.parsing.body import check_other_fields, decode_body
from llm_serving.server.request_context import CONTEXT_KEY, RequestContext
from llm_serving.server.routes import ENDPOINTS
from llm_serving.transport.channel import Channel
from llm_serving.transport.codec import decode_output
from llm_serving.transport.messages import AgentMessage, MasterMessage, StepDone, StepFailed
from starlette.requests import Request
from tools.fuzzing.connections import CONNECTIONS, read_connections

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Target:
    """A reader of untrusted bytes."""

    read: Callable[[bytes], None]
    corpus: tuple[bytes, ...]
    """Valid inputs, which the fuzzer changes."""
    package: str
    """Package whose branches guide a fuzzer."""


def read_frames(data: bytes) -> None:
    """Read the bytes at one end of a channel; the first byte selects the end."""
    incoming = MasterMessage if data[:1] < b"\x80" else AgentMessage
    ours, theirs = socket.socketpair()
    with theirs:
        channel: Channel[object] = Channel(ours, incoming)  # type: ignore[arg-type]
        try:
            theirs.sendall(data[1:65536])
            theirs.shutdown(socket.SHUT_WR)
            while True:
                message = channel.receive()
                if isinstance(message, StepDone):
                    decode_output(message)
        except (ChannelClosedError, ProtocolError):
            pass
        finally:
            channel.close()


def read_yaml(data: bytes) -> None:
    path = _folder() / "config.yaml"
    path.write_bytes(data)
    try:
        load_config(path)
    except ConfigError as error:
        assert len(str(error)) < 4000, "an error repeats what was given at length"


def read_requests(data: bytes) -> None:
    """Read the bytes as the body of every route, and build sampling parameters from a body that has their fields."""
    http_request = Request({"type": "http", CONTEXT_KEY: RequestContext(HttpTimings(0.0), "POST", "/v1")})
    for kind in {endpoint.body for endpoint in ENDPOINTS if endpoint.body is not None}:
        for strict in (True, False):
            try:
                body = decode_body(data, kind, strict=strict)
                check_other_fields(http_request, kind, data)
            except RequestError as error:
                assert len(str(error)) < 4000, "an error repeats what was given at length"
                continue
            known = {
                name for name in SamplingParams.__dataclass_fields__ if name not in ("stop", "logit_bias", "logprobs")
            }
            given = {name: value for name in known if (value := getattr(body, name, None)) is not None}
            with contextlib.suppress(RequestError):
                SamplingParams(**{**given, "stop_token_ids": tuple(given.get("stop_token_ids", ()))})


def read_safetensors(data: bytes) -> None:
    """Read every tensor that the header describes."""
    path = _folder() / "model.safetensors"
    path.write_bytes(data)
    try:
        reader = WeightReader(path.parent)
        for name, shape in reader.shapes().items():
            assert reader.read(name, shape).shape == shape
    except ModelError as error:
        assert len(str(error)) < 4000, "an error repeats what was given at length"


@cache
def _folder() -> Path:
    """Return a folder that is removed when the process ends."""
    return Path(_FOLDER.name)


_FOLDER = tempfile.TemporaryDirectory(prefix="llm-serving-fuzz-")


def _frame(message: msgspec.Struct, first: bytes) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return first + len(payload).to_bytes(4, "little") + payload


def _safetensors(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


FRAMES = (
    _frame(StepDone(3, (b"\1\0\0\0", b"\0\0\0\0"), {}), b"\x80"),
    _frame(StepFailed(7, "ValueError: no"), b"\x80"),
    _frame(StepFailed(7, "x"), b"\x80") * 2,
    b"\0" + b"\x02\0\0\0\x91\x91",
)
REQUESTS = (
    b'{"prompt": "hello", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "stop": ["a"], "logit_bias": {"5": 1}}',
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "n": 2, "stream": true}',
    b'{"inputs": "hello", "parameters": {"max_new_tokens": 4, "do_sample": "True", "details": true}, "stream": false}',
    b'{"tokens": [1, 2, 3]}',
    b'{"prompt": "hello", "min_p": 0.1, "tools": [], "grammar": null, "mirostat": 1e400, "unknown": 1}',
)
TENSORS = (
    _safetensors({"a.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}, bytes(16)),
    _safetensors(
        {
            "a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]},
            "b": {"dtype": "F16", "shape": [], "data_offsets": [4, 6]},
            "__metadata__": {"format": "pt"},
        },
        bytes(6),
    ),
)
YAML = (
    *((ROOT / "configs" / name).read_bytes() for name in ("demo_cpu.yaml", "serving.yaml")),
    b"model_config: &m {model_path: demo}\npa_config: {num_blocks: 8}\nscheduler_config:\n    <<: {policy: mixed}\n",
)
TARGETS = {
    "connections": Target(read_connections, tuple(b"\x07" + each for each in CONNECTIONS), "llm_serving.server.http"),
    "frames": Target(read_frames, FRAMES, "llm_serving.transport"),
    "requests": Target(read_requests, REQUESTS, "llm_serving.server"),
    "safetensors": Target(read_safetensors, TENSORS, "llm_serving.models"),
    "yaml": Target(read_yaml, YAML, "llm_serving.config"),
}
