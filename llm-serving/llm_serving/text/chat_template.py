"""Chat templates of model folders, rendered in processes of their own."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jinja2
import msgspec

from llm_serving.core.unicode import is_unicode
from llm_serving.errors import ModelError, RequestError, TransportError
from llm_serving.log import get_logger
from llm_serving.text.confined_process import ConfinedProcess
from llm_serving.text.template_process import Answer, Compile, Refused, Render, sandbox

logger = get_logger(__name__)

MAX_TEMPLATE_CHARS: Final = 2**18
NUM_PROCESSES: Final = 2
"""So that one text which takes all its time does not hold up the others."""
MAX_CPU_S: Final = 2.0
"""For one text; the longest conversations take a tenth of it."""
MODULE: Final = "llm_serving.text.template_process"


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
        if not is_unicode(source):
            raise ModelError("chat_template must be text that UTF-8 has a form for; it holds half a character")
        try:
            sandbox().parse(source)  # to compile it is to compute what is constant in it: that is for the process
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"chat_template cannot be compiled: {str(error)[:200]}") from None
        self.source = source
        """The text."""
        self._free: queue.SimpleQueue[ConfinedProcess[Answer] | None] = queue.SimpleQueue()
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
                process = process if process is not None and process.lives else _started(self.source)
                answer = process.ask(question)
            except TransportError as error:
                logger.warning("a chat template used up its time or memory, its process ends: %s", error)
                if process is not None:
                    process.end()
                process = None
                raise RequestError("messages", "take the model's chat template too much time or memory") from None
            except OverflowError:
                raise RequestError(_overflowing(question), "must hold integers of 64 bits only") from None
        finally:
            self._free.put(process)
        if isinstance(answer, Refused):
            raise RequestError("messages", answer.rule)
        return answer.text


def _overflowing(question: Render) -> str:
    """The field with an integer that no frame holds."""
    for field, value in (("messages", question.messages), ("tools", question.variables.get("tools"))):
        try:
            msgspec.msgpack.encode(value)
        except OverflowError:
            return field
    return "chat_template_kwargs"


def _started(source: str) -> ConfinedProcess[Answer]:
    """A process that has compiled the template.

    Raises:
        RequestError: It cannot be compiled.
        TransportError: To compile it takes too much.
    """
    process: ConfinedProcess[Answer] = ConfinedProcess(MODULE, MAX_CPU_S, Answer)  # type: ignore[arg-type]
    try:
        answer = process.ask(Compile(source))
    except TransportError:
        process.end()
        raise
    if isinstance(answer, Refused):
        process.end()
        raise RequestError("messages", answer.rule)
    return process
