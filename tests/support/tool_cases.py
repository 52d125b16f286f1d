"""A fake model with tool calls in the format of Qwen, the input of its chat template, and calls in other formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llm_serving.text.tokenizer.sentencepiece import SentencePieceVocabulary
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from support.fakes import DEMO_FOLDER, FakeEngine

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zurich"}}\n</tool_call>'
ARGUMENTS = '{"city": "Zurich"}'
HERMES = "{{ messages | tojson }}{{ tools | tojson }}{# <tool_call> <think></think> #}"
"""A template that renders all its input, for a model that calls tools as Qwen does and reasons before it answers."""


def tokenizer_with(template: str) -> Tokenizer:
    vocabulary = SentencePieceVocabulary(DEMO_FOLDER / "tokenizer.model", {})
    return Tokenizer(vocabulary, {}, chat_templates={"default": template})


def prompt_of(engine: FakeEngine, index: int = 0) -> Any:
    """Return the messages and tools that the template received."""
    text = engine.tokenizer.decode(engine.submitted[index].prompt_token_ids)
    messages, end = json.JSONDecoder().raw_decode(text)
    return messages, json.loads(text[end:])


Written = tuple[str, str]
"""Name and arguments, as JSON text, of a call."""


def _texts(arguments: str) -> dict[str, str]:
    return {key: each if isinstance(each, str) else json.dumps(each) for key, each in json.loads(arguments).items()}


def qwen_xml(*calls: Written) -> str:
    texts = []
    for name, arguments in calls:
        values = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in _texts(arguments).items())
        texts.append(f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>")
    return "\n".join(texts)


def seed(*calls: Written) -> str:
    texts = []
    for name, arguments in calls:
        values = "".join(f"<parameter={key}>{text}</parameter>\n" for key, text in _texts(arguments).items())
        texts.append(f"<seed:tool_call>\n<function={name}>\n{values}</function>\n</seed:tool_call>")
    return "\n".join(texts)


def minimax(*calls: Written) -> str:
    texts = []
    for name, arguments in calls:
        values = "".join(f'<parameter name="{key}">{text}</parameter>\n' for key, text in _texts(arguments).items())
        texts.append(f'<invoke name="{name}">\n{values}</invoke>\n')
    return f"<minimax:tool_call>\n{''.join(texts)}</minimax:tool_call>"


def deepseek_dsml(*calls: Written) -> str:
    texts = []
    for name, arguments in calls:
        kinds = ("true" if isinstance(each, str) else "false" for each in json.loads(arguments).values())
        values = "".join(
            f'<｜DSML｜parameter name="{key}" string="{kind}">{text}</｜DSML｜parameter>\n'
            for kind, (key, text) in zip(kinds, _texts(arguments).items(), strict=True)
        )
        texts.append(f'<｜DSML｜invoke name="{name}">\n{values}</｜DSML｜invoke>\n')
    return f"<｜DSML｜function_calls>\n{''.join(texts)}</｜DSML｜function_calls>"


def deepseek(*calls: Written) -> str:
    texts = (f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>" for name, arguments in calls)
    return f"<｜tool▁calls▁begin｜>{''.join(texts)}<｜tool▁calls▁end｜>"


def deepseek_fenced(*calls: Written) -> str:
    texts = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(texts) + "<｜tool▁calls▁end｜>"


def kimi(*calls: Written) -> str:
    texts = (
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(texts)}<|tool_calls_section_end|>"


def harmony(*calls: Written) -> str:
    texts = (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
        for name, arguments in calls
    )
    return "<|start|>assistant".join(texts)


def granite(*calls: Written) -> str:
    each = (f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls)
    return f"<|tool_call|>[{', '.join(each)}]"


def hunyuan(*calls: Written) -> str:
    return f"<tool_calls>{granite(*calls).removeprefix('<|tool_call|>')}</tool_calls>"


def nemotron(*calls: Written) -> str:
    return f"<TOOLCALL>{granite(*calls).removeprefix('<|tool_call|>')}</TOOLCALL>"


def cohere(*calls: Written) -> str:
    each = (
        f'    {{"tool_call_id": "{i}", "tool_name": "{name}", "parameters": {arguments}}}'
        for i, (name, arguments) in enumerate(calls)
    )
    return "<|START_ACTION|>[\n" + ",\n".join(each) + "\n]<|END_ACTION|>"


def _pythonic(*calls: Written) -> list[str]:
    values = ((name, json.loads(arguments).items()) for name, arguments in calls)
    return [f"{name}({', '.join(f'{key}={value!r}' for key, value in items)})" for name, items in values]


def lfm2(*calls: Written) -> str:
    return f"<|tool_call_start|>[{', '.join(_pythonic(*calls))}]<|tool_call_end|>"


def minicpm(*calls: Written) -> str:
    return "<|tool_call_start|>\n```python\n" + "\n".join(_pythonic(*calls)) + "\n```\n<|tool_call_end|>\n"


def olmo(*calls: Written) -> str:
    return "<function_calls>\n" + "\n".join(_pythonic(*calls)) + "\n</function_calls>"


def _of_gemma(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_of_gemma(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(_of_gemma, value))}]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def gemma(*calls: Written) -> str:
    return "".join(
        f"<|tool_call>call:{name}{_of_gemma(json.loads(arguments))}<tool_call|>" for name, arguments in calls
    )


WRITERS: dict[str, Callable[..., str]] = {
    each.__name__: each
    for each in (
        qwen_xml,
        seed,
        minimax,
        deepseek_dsml,
        deepseek,
        deepseek_fenced,
        kimi,
        harmony,
        granite,
        hunyuan,
        cohere,
        minicpm,
        lfm2,
        olmo,
        gemma,
    )
}
"""Format -> function that returns the text of calls."""
