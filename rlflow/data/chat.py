"""Chat messages: what a message may hold, and how prompts become what a chat template reads.

A template itself is run by the tokenizer, elsewhere.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlflow.data.paths import declared_here, resolve_path
from rlflow.errors import Finding, Source, UsageError, known_names, near_names

ROLES = ("system", "developer", "user", "assistant", "tool")
Tool = Callable[..., Any] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Chat:
    """How prompts go through a chat template: `chat=rf.Chat(...)` in the place of `chat=True`.

    `tools` are what the template shows the model: JSON schemas, or Python functions, whose
    annotations and Google-style docstrings make the schemas. `template` is used instead of the
    tokenizer's: its text, or the path of a file. `system` goes before every prompt that has no
    system message of its own. Raises `UsageError` (E289, E601) where they cannot be right.
    """

    tools: Sequence[Tool] = ()
    template: str | None = None
    system: str | None = None
    declared: Source | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        where = self.declared or declared_here()
        object.__setattr__(self, "declared", where)
        object.__setattr__(self, "tools", tuple(self.tools))
        for tool in self.tools:
            problem = _schema_problem(tool) if isinstance(tool, Mapping) else _tool_problem(tool)
            if problem:
                raise _bad(f"{_tool_name(tool)} is no tool", where, got=problem, expected=EXPECTED)
        names = [_tool_name(tool) for tool in self.tools]
        for name in names:
            if names.count(name) > 1:
                raise _bad(f"two tools are called {name}", where, expected="names of their own")
        if self.template is not None and "{" not in self.template:
            near = Path(where.path) if where is not None else None
            path = resolve_path(self.template, near, where)
            object.__setattr__(self, "template", path.read_text(encoding="utf-8"))

    def messages(self, prompt: str) -> list[dict[str, Any]]:
        """A prompt as messages: text is one user message, JSON of messages is what it says."""
        found = messages_of(prompt)
        if self.system is None or found[0]["role"] == "system":
            return found
        return [{"role": "system", "content": self.system}, *found]

    def describe(self) -> str:
        """The tools by name, and whether the template and the system message are its own."""
        parts = [f"tools {', '.join(map(_tool_name, self.tools))}"] if self.tools else []
        parts += ["own template"] if self.template is not None else []
        parts += ["system message"] if self.system is not None else []
        return f"({'; '.join(parts)})"


EXPECTED = """a function with annotated parameters and a docstring that describes each under Args:
{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}"""


def messages_of(prompt: str) -> list[dict[str, Any]]:
    """Messages that a text holds as JSON, or the text as one message of a user."""
    if prompt.startswith("[{"):
        try:
            found = json.loads(prompt)
        except json.JSONDecodeError:
            found = []
        if found and all(isinstance(entry, dict) and "role" in entry for entry in found):
            messages: list[dict[str, Any]] = found
            return messages
    return [{"role": "user", "content": prompt}]


def message_problem(message: object) -> str:
    """What is wrong with a message, "" if nothing: its role, its content, its calls of tools."""
    if not isinstance(message, Mapping):
        return f"is {message!r}"
    role = message.get("role")
    if role not in ROLES:
        near = near_names(str(role), ROLES)
        hint = f", near {near[0]!r}" if near else f", not one of {known_names(ROLES)}"
        return f"has the role {role!r}{hint}"
    calls = message.get("tool_calls")
    if calls is not None and (role != "assistant" or not _are_calls(calls)):
        return f"has tool_calls {calls!r}"
    content = message.get("content")
    if isinstance(content, str) or (content is None and calls) or _are_parts(content):
        return ""
    return f"is {dict(message)!r}"


def _are_parts(content: Any) -> bool:
    """Whether a content is parts: texts, and places where pictures of the row stand."""
    if not isinstance(content, list) or not content:
        return False
    return all(
        isinstance(part, Mapping)
        and (
            (part.get("type") == "text" and isinstance(part.get("text"), str))
            or (part.get("type") == "image" and set(part) == {"type"})
        )
        for part in content
    )


def _are_calls(calls: Any) -> bool:
    """Whether these are calls of functions by name, in either of the two usual forms."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        return False
    called = [call.get("function", call) for call in calls]
    return bool(called) and all(isinstance(c, Mapping) and "name" in c for c in called)


def _tool_name(tool: Any) -> str:
    if isinstance(tool, Mapping):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        return str(name or f"{dict(tool)!r:.60}")
    return str(getattr(tool, "__name__", repr(tool)))


def _schema_problem(schema: Mapping[str, Any]) -> str:
    function = schema.get("function")
    if schema.get("type") != "function" or not isinstance(function, Mapping):
        return f"keys {known_names(tuple(map(str, schema)))}"
    missing = [key for key in ("name", "description") if not isinstance(function.get(key), str)]
    if missing:
        return f"no text for {' and '.join(missing)}"
    try:
        json.dumps(schema)
    except TypeError as error:
        return str(error)
    return ""


def _tool_problem(tool: Any) -> str:
    """Why no schema can be made of a function; "" if one can."""
    if not callable(tool):
        return type(tool).__name__
    doc = inspect.getdoc(tool)
    if not doc:
        return "no docstring"
    for parameter in inspect.signature(tool).parameters.values():
        if parameter.annotation is inspect.Parameter.empty:
            return f"parameter {parameter.name!r} has no annotation"
        if f"{parameter.name}:" not in doc.partition("Args:")[2]:
            return f"parameter {parameter.name!r} is not described under Args:"
    return ""


def _bad(what: str, where: Source | None, **parts: Any) -> UsageError:
    return UsageError(Finding(code="E289", what=what, where=where, **parts))
