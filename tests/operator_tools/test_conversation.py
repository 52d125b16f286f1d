"""`llm-serving chat` with a real server and a fake engine."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from llm_serving.cli import main
from llm_serving.config.tables import ApiKey
from llm_serving.core.request import FinishReason
from llm_serving.errors import UnavailableError
from llm_serving.server.middleware.authentication import hash_key
from llm_serving_tools.commands.chat import COMMANDS, Chat, ChatClient
from llm_serving_tools.server_client import ServerRefusal
from support.fakes import FakeEngine, Piece, Script
from support.http_serving import serving

KEY = "a-key-of-the-tests"


def talk(client: ChatClient, lines: Sequence[str | BaseException]) -> str:
    """Return the output of the terminal for these input lines; an exception is raised in place of a line."""
    left = iter([*lines, EOFError()])

    def read(prompt: str) -> str:
        line = next(left)
        if isinstance(line, BaseException):
            raise line
        return line

    out = io.StringIO()
    ticks = iter(range(10**6))
    Chat(client, read, out, lambda: float(next(ticks))).run()
    return out.getvalue()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[ChatClient]:
    with serving(engine) as url:
        yield ChatClient(url)


def turns(client: ChatClient) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in client.messages]


def test_chat_streams_and_remembers_answers(client: ChatClient) -> None:
    assert talk(client, ["hello", "more"]) == "Hello world\n(3 tokens in 2.0 s, the first after 1.00 s)\n" * 2 + "\n"
    assert turns(client) == [
        ("user", "hello"),
        ("assistant", "Hello world"),
        ("user", "more"),
        ("assistant", "Hello world"),
    ]


def test_chat_sends_system_message_and_parameters(engine: FakeEngine, client: ChatClient) -> None:
    talk(client, ["/system be kind", "/set seed 7", "/set stop xx", "hello \\", "world", "/set stop"])
    sampling = engine.submitted[0].sampling
    assert (sampling.seed, sampling.stop) == (7, ("xx",))
    assert client.parameters == {"seed": 7}
    assert turns(client)[0] == ("user", "hello \nworld")
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello \nworld"}]
    text = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert engine.submitted[0].prompt_token_ids == engine.tokenizer.encode(text, add_special_tokens=False)


def test_chat_ctrl_c_ends_the_answer(engine: FakeEngine, client: ChatClient) -> None:
    class Interrupted(io.StringIO):
        def write(self, text: str) -> int:
            if text == " world":
                raise KeyboardInterrupt
            return super().write(text)

    engine.script = Script((Piece("Hello"), Piece(" world"), Piece("!")))
    out = Interrupted()
    chat = Chat(client, input, out)
    chat.answer("hello")
    assert out.getvalue() == "Hello\n(ended)\n"
    assert turns(client) == [("user", "hello"), ("assistant", "Hello world")]


def test_chat_ctrl_c_at_the_prompt_continues(client: ChatClient) -> None:
    shown = talk(client, [KeyboardInterrupt(), "hello"])
    assert "/quit ends" in shown
    assert "Hello world" in shown


def test_chat_slash_commands_edit_show_and_save_the_conversation(client: ChatClient, tmp_path: Any) -> None:
    path = tmp_path / "talk.json"
    shown = talk(
        client, ["/retry", "a", "/retry", "b", "/undo", "/history", f"/save {path}", "/models", "/none", "/help"]
    )
    assert shown.count("Hello world\n(") == 3
    assert "user: a\nassistant: Hello world\n" in shown
    assert "demo\n" in shown
    assert "/none is unknown" in shown
    assert all(f"  /{name}" in shown for name in COMMANDS)
    assert [each["content"] for each in json.loads(path.read_text())["messages"]] == ["a", "Hello world"]
    assert talk(client, ["/reset", "/undo", "/save", "/save /no/such/place", "/quit", "never said"]).count("\n") == 4
    assert client.messages == []


def test_chat_saves_any_text_and_reports_any_bad_file_name(client: ChatClient, tmp_path: Any) -> None:
    path = tmp_path / "talk.json"
    shown = talk(client, ["/system \udcff", f"/save {path}", "/save ~no-such-user/x", "/save a\0b", "/quit"])
    assert json.loads(path.read_text())["system"] == "\udcff"
    assert shown.count("error: ") == 2


def test_chat_keeps_the_last_turn_if_a_retry_gets_no_answer(engine: FakeEngine, client: ChatClient) -> None:
    talk(client, ["a"])
    engine.script = Script((Piece("b"),), error="the WorkAgent died")
    assert "error: the WorkAgent died" in talk(client, ["/retry"])
    assert turns(client) == [("user", "a"), ("assistant", "Hello world")]


def test_chat_accepts_input_that_is_not_utf8_and_refuses_closed_input(
    client: ChatClient, capsys: Any, monkeypatch: Any
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(b"/save \xff\0\n/quit\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stream)
    assert main.main(["chat", "--url", client.url]) == 0
    assert "error: \ufffd" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", None)
    assert main.main(["chat", "--url", client.url]) == 2
    assert "standard input, which is closed" in capsys.readouterr().err


def test_chat_replaces_control_characters(engine: FakeEngine, client: ChatClient) -> None:
    engine.script = Script((Piece("a\x1b[2J\x07\rb\n\tc"), Piece("")), FinishReason.LENGTH)
    shown = talk(client, ["x", "/history"])
    assert shown.startswith("a�[2J��b\n\tc\n")
    assert "stopped at the maximum length" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (Script((Piece("a"), Piece("b")), error="the WorkAgent died"), "error: the WorkAgent died"),
        (Script((Piece("b"),), error="the WorkAgent died"), "error: the WorkAgent died"),
    ],
)
def test_chat_reports_a_broken_answer(engine: FakeEngine, client: ChatClient, script: Script, text: str) -> None:
    engine.script = script
    assert text in talk(client, ["x"])
    assert turns(client) == ([("user", "x"), ("assistant", "a")] if len(script.pieces) == 2 else [])


def test_chat_shows_the_servers_error(client: ChatClient) -> None:
    client.parameters = {"temperature": -1}
    assert "error: 400: `temperature` must be a number" in talk(client, ["x"])
    assert client.messages == []


def test_chat_sends_the_api_key() -> None:
    engine = FakeEngine(api_keys=(ApiKey(name="t", key_sha256=hash_key(KEY)),))
    with serving(engine) as url:
        with pytest.raises(ServerRefusal, match="401"):
            ChatClient(url).served_models()
        assert ChatClient(url, KEY).served_models() == ["demo"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "https://127.0.0.1:1"])
def test_chat_without_a_server_is_an_error(url: str) -> None:
    with pytest.raises(UnavailableError, match="no server answers"):
        ChatClient(url).served_models()


def test_chat_command_line_accepts_url_parameters_and_system_message(
    client: ChatClient, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    lines: Iterator[str] = iter(["hello", "/quit"])
    read: Callable[[str], str] = lambda prompt: next(lines)  # noqa: E731
    monkeypatch.setattr("builtins.input", read)
    assert main.main(["chat", "--url", client.url, "--set", "seed=7", "--system", "be kind"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"demo at {client.url}; /help")
    assert "Hello world" in shown
    assert main.main(["chat", "--url", client.url, "--set", "seed"]) == 2
    assert main.main(["chat", "--url", "file:///etc/passwd"]) == 2
