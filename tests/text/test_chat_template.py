"""Chat templates: prompts and errors equal those of `apply_chat_template` of the transformers library."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from llm_serving.errors import ModelError, RequestError
from llm_serving.text.chat_template import ChatTemplate, Conversations, read_templates

CASES = Path(__file__).parent / "chat_cases"
CONVERSATIONS = json.loads((CASES / "conversations.json").read_text("utf-8"))
EXPECTED = json.loads((CASES / "expected.json").read_text("utf-8"))
USER = [{"role": "user", "content": "x"}]


class TestGolden:
    """The expected prompts are written by `golden_chat.py`."""

    @pytest.mark.parametrize("template", sorted(EXPECTED))
    def test_chat_template_prompts_and_errors_equal_those_of_transformers(self, template):
        source = (CASES / f"{template}.jinja").read_text("utf-8")
        conversations = Conversations({"default": source}, CONVERSATIONS["special_tokens"])
        expected = EXPECTED[template]
        assert {name: self.render(conversations, CONVERSATIONS["conversations"][name]) for name in expected} == expected

    def render(self, conversations, case):
        case = {"add_generation_prompt": not case.get("continue_final_message", False)} | case
        variables, messages = case.pop("variables", {}), case.pop("messages")
        try:
            return conversations.render(messages, **case, **variables)
        except RequestError:
            return None

    def test_every_chat_template_has_golden_prompts(self):
        assert sorted(EXPECTED) == sorted(path.stem for path in CASES.glob("*.jinja"))
        for texts in EXPECTED.values():
            assert len(CONVERSATIONS["conversations"]) - len(texts) <= 6
            assert sum(text is not None for text in texts.values()) >= len(texts) / 2


class TestFeatures:
    def test_chat_template_may_use_strftime_now(self):
        before = datetime.now()
        text = Conversations({"default": "{{ strftime_now('%Y-%m-%d') }}"}, {}).render(USER)
        assert text in {f"{moment:%Y-%m-%d}" for moment in (before, datetime.now())}

    def test_chat_template_generation_block_has_local_variables(self):
        template = ChatTemplate("{% generation %}{% set a = 1 %}{{ a }}{% endgeneration %}{{ a is defined }}")
        assert template.render(USER) == "1False"

    def test_chat_template_with_an_unclosed_generation_block_is_refused_at_start(self):
        with pytest.raises(ModelError, match="chat_template cannot be compiled"):
            ChatTemplate("{% generation %}text")

    def test_continue_final_message_requires_text(self):
        with pytest.raises(RequestError, match="the last message has no text"):
            Conversations({"default": "x"}, {}).render(
                [{"role": "assistant", "content": None}], add_generation_prompt=False, continue_final_message=True
            )


NAMED = {"default": "plain", "tool_use": "tools: {{ tools | length }}", "rag": "{{ documents }}"}


class TestNamedTemplates:
    def test_tool_use_template_serves_conversations_with_tools(self):
        conversations = Conversations(NAMED, {})
        assert conversations.render(USER) == "plain"
        assert conversations.render(USER, tools=[{}, {}]) == "tools: 2"
        assert conversations.render(USER, tools=[]) == "tools: 0"

    def test_default_template_serves_tools_without_tool_use_template(self):
        assert Conversations({"default": "{{ tools }}"}, {}).render(USER, tools=[1]) == "[1]"

    def test_error_without_default_template_lists_the_names(self):
        with pytest.raises(RequestError, match=r"none of the model's chat templates \(rag, tool_use\) is named"):
            Conversations({name: NAMED[name] for name in ("rag", "tool_use")}, {}).render(USER)

    def test_unused_template_is_not_compiled(self):
        assert Conversations({"default": "x", "rag": "{% for %}"}, {}).render(USER) == "x"


class TestFiles:
    def write(self, folder, **files):
        for name, text in files.items():
            path = folder / name.replace("__", "/").replace("_jinja", ".jinja").replace("_json", ".json")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, "utf-8")

    def test_tokenizer_config_may_list_several_templates(self, tmp_path):
        listed = [{"name": name, "template": text} for name, text in NAMED.items()]
        assert read_templates(tmp_path, {"chat_template": listed}) == NAMED
        assert read_templates(tmp_path, {"chat_template": "one"}) == {"default": "one"}
        assert read_templates(tmp_path, {}) == {}

    def test_additional_templates_are_read_from_their_folder(self, tmp_path):
        self.write(tmp_path, chat_template_jinja="ä", additional_chat_templates__tool_use_jinja="b")
        assert read_templates(tmp_path, {}) == {"default": "ä", "tool_use": "b"}

    def test_default_template_file_replaces_those_of_the_config(self, tmp_path):
        listed = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "old"}]
        self.write(tmp_path, chat_template_jinja="new")
        assert read_templates(tmp_path, {"chat_template": listed}) == {"default": "new"}

    def test_additional_templates_extend_those_of_the_config(self, tmp_path):
        self.write(tmp_path, additional_chat_templates__tool_use_jinja="b")
        assert read_templates(tmp_path, {"chat_template": "a"}) == {"default": "a", "tool_use": "b"}

    def test_processor_template_is_the_last_choice(self, tmp_path):
        self.write(tmp_path, chat_template_json=json.dumps({"chat_template": "processor"}))
        assert read_templates(tmp_path, {}) == {"default": "processor"}
        assert read_templates(tmp_path, {"chat_template": "config"}) == {"default": "config"}

    @pytest.mark.parametrize("text", ["{", "[]", "{}", '{"chat_template": 1}', "[" * 100_000])
    def test_processor_file_without_template_is_refused(self, tmp_path, text):
        self.write(tmp_path, chat_template_json=text)
        with pytest.raises(ModelError, match=r"chat_template\.json: (must be a JSON object|cannot be read)"):
            read_templates(tmp_path, {})

    def test_too_many_templates_are_refused(self, tmp_path):
        self.write(tmp_path, **{f"additional_chat_templates__t{i}_jinja": "" for i in range(65)})
        with pytest.raises(ModelError, match=r"additional_chat_templates: must hold at most 64 templates\. Given: 65"):
            read_templates(tmp_path, {})


def test_chat_template_with_a_number_of_thousands_of_digits_is_refused():
    with pytest.raises(ModelError, match=r"chat_template cannot be compiled: Exceeds the limit"):
        ChatTemplate("{{ " + "9" * 5000 + " }}")
