"""Parsers of tool calls: each format, and every division of a text into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_serving.text.tool_parsers import TOOL_FORMATS, Call, format_in
from support.parsed_calls import ADD, NAMES, WEATHER, answer_of, as_json
from support.tool_cases import WRITERS

GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich </tool_call></arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>[1, 2]</arg_value>\n<arg_key>code</arg_key><arg_value>007</arg_value>"
    "</tool_call>"
)
GLM_CALL = ("get_weather", {"city": "Zürich </tool_call>", "days": [1, 2], "code": "007"})
XML = {"city": "Zürich </function>\n</parameter>\n", "days": [1, 2], "code": "007"}
TEXTS = [("get_weather", json.dumps(WEATHER)), ("add", json.dumps(ADD))]
BOTH = [("get_weather", WEATHER), ("add", ADD)]
HERMES = f"<tool_call>\n{as_json('get_weather', WEATHER)}\n</tool_call>"
ADD_TEXT = json.dumps(ADD)
GET = WRITERS["qwen_xml"](("get", '{"a": ""}'))
FENCED = WRITERS["deepseek_fenced"](*TEXTS)
KIMI = WRITERS["kimi"](*TEXTS)
CASES = [
    ("hermes", HERMES, "", BOTH[:1]),
    ("hermes", f"Let me look. \n\n{HERMES}\n<tool_call>{as_json('add', ADD)}</tool_call>\n", "Let me look.", BOTH),
    ("hermes", f"{HERMES}That is all.", "That is all.", BOTH[:1]),
    ("hermes", f"<tool_call>{as_json('add', ADD, indent=2)}", "", BOTH[1:]),
    ("hermes", f"<tool_call>{as_json('add', json.dumps(ADD), 'parameters')}</tool_call>", "", BOTH[1:]),
    ("llama", as_json("get_weather", WEATHER, "parameters"), "", BOTH[:1]),
    ("llama", f"  <|python_tag|>{as_json('get_weather', WEATHER)}; {as_json('add', ADD)}", "", BOTH),
    ("llama", f"{as_json('add', ADD)}\nDone; {{1}}", "\nDone; {1}", BOTH[1:]),
    ("llama", f"I see. <|python_tag|>{as_json('add', ADD)}", "I see.", BOTH[1:]),
    ("llama", f"I see. <|python_start|><|python_end|>{as_json('add', ADD, 'parameters')}", "I see.", BOTH[1:]),
    ("llama", f"<|python_start|>{as_json('add', ADD, 'parameters')}<|python_end|>", "", BOTH[1:]),
    ("mistral", f"[TOOL_CALLS] [{as_json('get_weather', WEATHER)}, {as_json('add', ADD)}]", "", BOTH),
    (
        "mistral",
        f"Sure.[TOOL_CALLS]get_weather[ARGS]{json.dumps(WEATHER)}[TOOL_CALLS]add{json.dumps(ADD)}",
        "Sure.",
        BOTH,
    ),
    ("mistral", f"[TOOL_CALLS]add[CALL_ID]abc123XYZ[ARGS] {json.dumps(ADD)}", "", BOTH[1:]),
    ("glm", GLM, "", [GLM_CALL]),
    ("glm", f"So: \n{GLM}\n<tool_call>get\n</tool_call>", "So:", [GLM_CALL, ("get", {})]),
    ("glm_lines", f"get_weather\n{json.dumps(WEATHER)}", "", BOTH[:1]),
    ("glm_lines", f"get_weather\n{json.dumps(WEATHER)}<|assistant|>add\n{json.dumps(ADD)}", "", BOTH),
    *(
        (
            form,
            f"So:\n\n{write(('get_weather', json.dumps(XML)), ('add', '{}'))}\n",
            "So:",
            [("get_weather", XML), ("add", {})],
        )
        for form, write in WRITERS.items()
        if form != "harmony"
    ),
    ("qwen_xml", f"{GET[12:-13]} and {GET[:-13]}", " and", 2 * [("get", {"a": ""})]),
    (
        "minimax",
        WRITERS["minimax"](("add", ADD_TEXT)).removesuffix("</minimax:tool_call>") + "Done",
        "\nDone",
        BOTH[1:],
    ),
    (
        "deepseek_dsml",
        '<｜DSML｜invoke name="get"><｜DSML｜parameter name="a" string="true">5</｜DSML｜parameter>'
        '<｜DSML｜parameter name="b" string="false">5</｜DSML｜parameter>'
        '<｜DSML｜parameter name="c" string="false">five</｜DSML｜parameter></｜DSML｜invoke> Done',
        " Done",
        [("get", {"a": "5", "b": 5, "c": "five"})],
    ),
    ("minicpm", "<|tool_call_start|>add(a=17, b=25)<|tool_call_end|>Done", "Done", BOTH[1:]),
    (
        "minicpm",
        "<|tool_call_start|>\n```python\nget(a='```\\n<|tool_call_end|>')\nadd(a=17,b=25)\n```",
        "",
        [("get", {"a": "```\n<|tool_call_end|>"}), *BOTH[1:]],
    ),
    ("deepseek", WRITERS["deepseek_fenced"](*TEXTS), "", BOTH),
    ("deepseek_fenced", FENCED.removesuffix("```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"), "", BOTH),
    (
        "lfm2",
        "<|tool_call_start|>[get(a=null, b=[true, None, -1.5], c={'d': \"e\"})]",
        "",
        [("get", {"a": None, "b": [True, None, -1.5], "c": {"d": "e"}})],
    ),
    (
        "olmo",
        "<function_calls>get(a='</function_calls>')</function_calls>x",
        "x",
        [("get", {"a": "</function_calls>"})],
    ),
    (
        "gemma",
        '<|tool_call>call:get{a:<|"|><tool_call|>"<|"|>,"b c":[true,-1.5,{d:null}],e:{}}<tool_call|>x',
        "x",
        [("get", {"a": '<tool_call|>"', "b c": [True, -1.5, {"d": None}], "e": {}})],
    ),
    ("granite", f"<tool_call>{json.dumps([{'name': 'add', 'arguments': ADD}])} Done", " Done", BOTH[1:]),
    ("hunyuan", WRITERS["hunyuan"](*TEXTS).removesuffix("</tool_calls>"), "", BOTH),
    (
        "cohere",
        "<|START_ACTION|>" + json.dumps({"tool_name": "add", "parameters": ADD}, indent=1),
        "",
        BOTH[1:],
    ),
    ("kimi", KIMI.removesuffix("<|tool_calls_section_end|>") + " Done", " Done", BOTH),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_parser_finds_calls(form: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    assert answer_of(form, text) == (content, calls)


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_parser_finds_calls_token_by_token(form: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    assert answer_of(form, text, range(len(text))) == (content, calls)


COMMON = [
    *("get_weather", "add", "\n", " ", "; ", "{", "}", "[", "]", '"', "\\", '\\"', "x", "1", "é", "<", "name", ": "),
    *(", ", as_json("add", ADD), json.dumps(ADD), '{"name": "add"}'),
]
TAGS = ["<tool_call>", "</tool_call>", "<tool"]
PARAMETERS = ["<function=add>", "</function>", "<parameter=a>", "</parameter>", "<function=", ">"]
DEEPSEEK = [
    *(f"<｜tool▁{each}｜>" for each in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
]
FRAGMENTS = {
    "lfm2": ["<|tool_call_start|>", "<|tool_call_end|>", "<|", "[add(a=1)]", "add(", "a='", "'", ")", "null"],
    "minicpm": ["<|tool_call_start|>", "<|tool_call_end|>", "```python\n", "```", "add(a=1)", "add(", "a='", "'", ")"],
    "gemma": ["<|tool_call>", "<tool_call|>", "<|", "call:add{", "a:1", "a:", '<|"|>', "}", "null"],
    "olmo": ["<function_calls>", "</function_calls>", "<func", "add(a=1)", "add(", "a='", "'", ")", "null"],
    "granite": ["<|tool_call|>", "<tool_call>", "<|tool", '[{"name": "add", "arguments": {}}]'],
    "hunyuan": ["<tool_calls>", "</tool_calls>", "<tool", '[{"name": "add", "arguments": {}}]'],
    "nemotron": ["<TOOLCALL>", "</TOOLCALL>", "<TOOL", '[{"name": "add", "arguments": {}}]'],
    "cohere": ["<|START_ACTION|>", "<|END_ACTION|>", "<|", '[{"tool_name": "add", "parameters": {}}]'],
    "harmony": [
        *(f"<|{each}|>" for each in ("start", "channel", "message", "constrain", "end", "call", "return")),
        *("assistant", "analysis", "commentary", "final", " to=functions.add", "<|channel|>analysis<|message|>", "<|"),
    ],
    "kimi": [
        *(f"<|tool_call{each}|>" for each in ("s_section_begin", "s_section_end", "_begin", "_end", "_argument_begin")),
        *("functions.add:0", ":"),
    ],
    "deepseek_fenced": [*DEEPSEEK, "function", "\n```json\n", "```"],
    "deepseek": DEEPSEEK,
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[TOOL"],
    "minimax": [
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        '<invoke name="add">',
        "</invoke>",
        '<parameter name="a">',
        "</parameter>",
        '">',
    ],
    "deepseek_dsml": [
        "<｜DSML｜function_calls>",
        "</｜DSML｜function_calls>",
        '<｜DSML｜invoke name="add">',
        "</｜DSML｜invoke>",
        '<｜DSML｜parameter name="a" string="true">',
        '<｜DSML｜parameter name="b" string="false">',
        '" string="',
        "</｜DSML｜parameter>",
        "<｜DSML｜",
    ],
    "seed": ["<seed:tool_call>", "</seed:tool_call>", *PARAMETERS],
    "qwen_xml": [*TAGS, *PARAMETERS],
    "glm": [*TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "hermes": TAGS,
    "llama": ["<|python_tag|>"],
    "glm_lines": ["<|assistant|>"],
}


def texts(form: str) -> st.SearchStrategy[str]:
    """Return random answers with the marks of a format."""
    marks = FRAGMENTS[form]
    return st.lists(st.sampled_from(COMMON) | st.sampled_from(marks), max_size=24).map("".join)


@pytest.mark.parametrize("form", TOOL_FORMATS)
@given(data=st.data())
def test_parser_result_is_independent_of_text_pieces(form: str, data: st.DataObject) -> None:
    text = data.draw(texts(form))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=len(text)))
    whole = answer_of(form, text)
    assert answer_of(form, text, cuts) == whole
    assert answer_of(form, text, range(len(text))) == whole


@pytest.mark.parametrize("form", [form for form in TOOL_FORMATS if form != "harmony"])
@given(data=st.data())
def test_parser_returns_text_without_calls_unchanged(form: str, data: st.DataObject) -> None:
    text = data.draw(texts(form))
    content, calls = answer_of(form, text)
    if not calls:
        assert content == text


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{%- if tools %}<tools>..</tools> <tool_call>", "hermes"),
        ("... <tool_call>{name}<arg_key>", "glm"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("<|start_header_id|> <|python_tag|>", "llama"),
        ("<|header_start|>assistant<|header_end|> <|python_start|>", "llama"),
        ("[gMASK]<sop> <|observation|>", "glm_lines"),
        ("<|channel|>analysis<|message|>", "harmony"),
        ("<tool_call>\\n<function=", "qwen_xml"),
        ("<seed:tool_call>\\n<function=", "seed"),
        ("'<minimax:tool_call>' <invoke name=", "minimax"),
        ("'<｜tool▁calls▁begin｜>' + '\\n' + '```json'", "deepseek_fenced"),
        ("'<｜tool▁calls▁begin｜>' + '<｜tool▁sep｜>'", "deepseek"),
        ("set dsml_token = '｜DSML｜' '\\n\\n<' + dsml_token + 'function_calls>\\n'", "deepseek_dsml"),
        ("set dsml_token = '｜DSML｜' '\\n\\n<' + dsml_token + 'tool_calls>\\n'", None),
        ("'<|tool_call_start|>\\n```python\\n'", "minicpm"),
        ("<|tool_calls_section_begin|>", "kimi"),
        ("respond only with <|tool_call|> followed by a JSON list", "granite"),
        ("<tool_calls>[{", "hunyuan"),
        ("'<TOOLCALL>[{{' </think>", "nemotron"),
        ("<|START_ACTION|>[ ```json", "cohere"),
        ("List of tools: <|tool_list_start|>[", "lfm2"),
        ("'<|tool_call>call:' + name + '{'", "gemma"),
        ("wrapped in <function_calls></function_calls> XML tags", "olmo"),
        ("{{ messages }}", None),
    ],
)
def test_chat_template_selects_tool_format(template: str, name: str | None) -> None:
    assert format_in(template) == name


def test_call_has_the_id_that_the_model_writes() -> None:
    parser = TOOL_FORMATS["kimi"].create(NAMES)
    [call, other] = parser.add(WRITERS["kimi"](("add", "{}"), ("other", "{}")))
    assert (call, other) == (Call("add", "{}", "functions.add:0"), Call("other", "{}", "functions.other:1"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'a\\nb\\\\ \\' \\x41 \\d'", "a\nb\\ ' A \\d"),
        (r'"\ud83d\ude8b \/ \u00e9 \""', '🚋 / é "'),
        ("'two\nlines'", "two\nlines"),
        ("'''it's'''", "it's"),
        ("''", ""),
        ("007", 7),
        ("-1.5e3", -1500.0),
        ("(1, [True, null],)", [1, [True, None]]),
        ("{'a': {\"b\": False}}", {"a": {"b": False}}),
    ],
)
def test_pythonic_call_arguments_are_parsed_as_values(text: str, value: Any) -> None:
    assert answer_of("lfm2", f"<|tool_call_start|>[get(from={text})]<|tool_call_end|>") == (
        "",
        [("get", {"from": value})],
    )


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "08001", "08001"),
        ({"type": "string"}, "12345", "12345"),
        ({"type": "string"}, "true", "true"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": "null"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["string", "number"]}, "5", 5),
        ({"enum": ["1", 2]}, "2", 2),
        ({"type": "integer"}, "5", 5),
        ({"anyOf": [{"type": "integer"}]}, "5", 5),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5", "5"),
        ({"oneOf": [{"type": "string"}, {"enum": [5]}]}, "5", 5),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/a"}]}, '{"b": 1}', {"b": 1}),
        ({"type": "boolean"}, "True", True),
        ({"type": ["array", "null"]}, "None", None),
        ({"type": ["boolean", "string"]}, "True", "True"),
        ({}, "True", "True"),
        ({}, "5", 5),
        (True, "5", 5),
        (None, "5", 5),
    ],
)
def test_type_of_an_argument_between_tags_follows_the_schema(schema: Any, text: str, value: Any) -> None:
    properties = {} if schema is None else {"properties": {"a": schema}}
    for form, answer in (
        ("glm", f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"),
        ("qwen_xml", f"<function=f><parameter=a>\n{text}\n</parameter></function></tool_call>"),
    ):
        parser = TOOL_FORMATS[form].create({"f": properties})
        [call] = [*parser.add(answer), *parser.flush()]
        assert isinstance(call, Call)
        assert json.loads(call.arguments) == {"a": value}
