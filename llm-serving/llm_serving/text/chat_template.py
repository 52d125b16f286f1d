"""Chat templates of model folders, rendered in processes of their own."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jinja2

from llm_serving.errors import ModelError, ProtocolError, RequestError, TransportError
from llm_serving.log import get_logger
from llm_serving.text.template_process import Answer, Compile, Refused, Render, Rendered, sandbox
from llm_serving.transport.channel import Channel

logger = get_logger(__name__)

MAX_TEMPLATE_CHARS: Final = 2**18
NUM_PROCESSES: Final = 2
"""So that one text which takes all its time does not hold up the others."""
MAX_CPU_S: Final = 2.0
"""For one text; the longest conversations take a tenth of it."""
ANSWER_TIMEOUT_S: Final = 60.0
"""Far beyond the time that a process gives itself: it may have to wait for a core."""
_ENVIRONMENT: Final = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TZ", "VIRTUAL_ENV")


class ChatTemplate:
    """One template. Its processes are started when they are first needed, and again when one has ended.

    Args:
        source: Jinja text, as in `chat_template` of `tokenizer_config.json`.

    Raises:
        ModelError: The text is no template.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"chat_template must have at most {MAX_TEMPLATE_CHARS} characters. Given: {len(source)}")
        try:
            sandbox().parse(source)  # to compile it is to compute what is constant in it: that is for the process
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"chat_template cannot be compiled: {str(error)[:200]}") from None
        self.source = source
        """The text."""
        self._free: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()
        for _ in range(NUM_PROCESSES):
            self._free.put(None)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: object) -> str:
        """The prompt text of a conversation; waits for a process, so call it off the event loop.

        Raises:
            RequestError: The template refuses the messages, fails on them, writes too much or takes too long.
        """
        process = self._free.get()
        try:
            question = Render([dict(message) for message in messages], variables)
            try:
                process = process if process is not None and process.lives else _Process(self.source)
                answer = process.ask(question)
            except TransportError as error:
                logger.warning("a chat template used up its time or memory, its process ends: %s", error)
                if process is not None:
                    process.end()
                process = None
                raise RequestError("messages", "take the model's chat template too much time or memory") from None
            except OverflowError:
                raise RequestError("chat_template_kwargs", "must hold integers of 64 bits only") from None
        finally:
            self._free.put(process)
        if isinstance(answer, Refused):
            raise RequestError("messages", answer.rule)
        return answer.text


class _Process:
    """One that has compiled the template; it ends with its end of the sockets.

    Raises:
        RequestError: The template cannot be compiled.
        TransportError: To compile it takes too much.
    """

    def __init__(self, source: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "llm_serving.text.template_process"]
            command += ["--socket-fd", str(theirs.fileno()), "--cpu-seconds", str(MAX_CPU_S)]
            environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
            # A session of its own: Ctrl-C reaches the whole group of the master.
            self._process = subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,
            )
        self._channel: Channel[Answer] = Channel(ours, Answer)  # type: ignore[arg-type]
        self.end = weakref.finalize(self, _end, self._process, self._channel)
        try:
            answer = self.ask(Compile(source))
        except TransportError:
            self.end()
            raise
        if isinstance(answer, Refused):
            self.end()
            raise RequestError("messages", answer.rule)

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: Compile | Render) -> Rendered | Refused:
        """Raises:
        TransportError: The process has ended, or does not answer.
        """
        self._channel.send(question)
        answer = self._channel.receive(ANSWER_TIMEOUT_S)
        if not isinstance(answer, Rendered | Refused):
            raise ProtocolError(f"a template process answered {type(answer).__name__}")
        return answer


def _end(process: subprocess.Popen[bytes], channel: Channel[Answer]) -> None:
    channel.close()
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()
