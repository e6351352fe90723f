"""Messages, tools and templates: what is accepted, and what is said of the rest."""

from __future__ import annotations

import json

import pytest

import rlflow as rf
from rlflow.data.chat import message_problem, messages_of
from rlflow.errors import UsageError

SCHEMA = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}


def search(query: str, limit: int = 3) -> str:
    """Look something up.

    Args:
        query: What to look for.
        limit: How many results.
    """
    return query * limit


def bare(query: str) -> str:
    return query


def vague(query: str) -> str:
    """Look something up."""
    return query


def untyped(query) -> str:
    """Look something up.

    Args:
        query: What to look for.
    """
    return query


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "system", "content": "x"},
        {"role": "developer", "content": "x"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "x", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {}}]},
        {"role": "tool", "name": "add", "content": "3"},
    ],
)
def test_messages_of_every_role(message):
    assert "" == message_problem(message)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("hello", "is 'hello'"),
        ({}, "has the role None, not one of system, developer, user, assistant, tool"),
        ({"role": "asistant", "content": "x"}, "has the role 'asistant', near 'assistant'"),
        ({"role": "user"}, "is {'role': 'user'}"),
        ({"role": "user", "content": 3}, "is {'role': 'user', 'content': 3}"),
        ({"role": "assistant", "content": None}, "is {"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "has tool_calls ["),
        ({"role": "assistant", "tool_calls": []}, "has tool_calls []"),
        ({"role": "assistant", "tool_calls": [{"id": 1}]}, "has tool_calls ["),
    ],
)
def test_what_is_no_message(message, problem):
    assert message_problem(message).startswith(problem)


def test_a_data_set_with_a_message_that_is_none(tmp_path):
    path = tmp_path / "chat.jsonl"
    rows = [[{"role": "user", "content": "x"}], [{"role": "uesr", "content": "x"}]]
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    (finding,) = rf.data.jsonl(path).check()
    assert ("E605", True) == (finding.code, "message 1 has the role 'uesr'" in finding.got)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("hi", [{"role": "user", "content": "hi"}]),
        ('[{"role": "system", "content": "x"}]', [{"role": "system", "content": "x"}]),
        ("[{broken", [{"role": "user", "content": "[{broken"}]),
        ('[{"a": 1}]', [{"role": "user", "content": '[{"a": 1}]'}]),
    ],
)
def test_a_prompt_as_messages(text, messages):
    assert messages == messages_of(text)


def test_a_system_message_goes_before_prompts_without_one():
    chat = rf.Chat(system="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert [system, {"role": "user", "content": "hi"}] == chat.messages("hi")
    own = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "hi"}]
    assert own == chat.messages(json.dumps(own))


def test_a_template_is_text_or_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    assert rf.Chat(template="{{ messages[0].content }}") == rf.Chat(template="chat.jinja")
    with pytest.raises(UsageError) as caught:
        rf.Chat(template="chat.jinjaa")
    assert ("E601", ("chat.jinja",)) == (
        caught.value.findings[0].code,
        caught.value.findings[0].near,
    )


def test_what_a_chat_is_called():
    chat = rf.Chat(tools=[search, SCHEMA], template="{{ x }}", system="Be brief.")
    assert "(tools search, add; own template; system message)" == chat.describe()


@pytest.mark.parametrize(
    ("tool", "got"),
    [
        (bare, "no docstring"),
        (vague, "parameter 'query' is not described under Args:"),
        (untyped, "parameter 'query' has no annotation"),
        ("search", "str"),
        ({"name": "add"}, "keys name"),
        ({"type": "function", "function": {"name": "add"}}, "no text for description"),
        (
            {"type": "function", "function": {"name": "x", "description": "x", "parameters": bare}},
            "Object of type function is not JSON serializable",
        ),
    ],
)
def test_what_is_no_tool(tool, got):
    with pytest.raises(UsageError) as caught:
        rf.Chat(tools=[tool])
    (finding,) = caught.value.findings
    assert ("E289", got) == (finding.code, finding.got)
    assert finding.where.path.endswith("test_chat.py")


def test_two_tools_of_one_name():
    with pytest.raises(UsageError, match="two tools are called search"):
        rf.Chat(tools=[search, search])
