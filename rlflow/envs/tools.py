"""An environment of tools: a response calls Python functions, and is told what they return.

Calls are JSON in tags, or what a regular expression finds. A tool that fails tells the model so;
only the function that scores the last response may fail an episode.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from rlflow.data.paths import declared_here
from rlflow.envs.base import Environment, Step
from rlflow.errors import Finding, UsageError, error_text, known_names
from rlflow.rewards.judging import number
from rlflow.rewards.workers import packed_function

CALL = r"<tool_call>\s*(.*?)\s*</tool_call>"
Tool = Callable[..., Any]


class ToolEnvironment(Environment):
    """Runs the tools that a response calls and answers with their results.

    A response without a call ends the episode. `pattern` finds calls: its first group is JSON,
    `{"name": ..., "arguments": {...}}`; or its groups `name` and `arguments` are the tool's name
    and JSON, or plain text for a tool of one argument. With a single tool no name is needed.
    `answer` is the observation for a call, with `{result}` in the place of the result. `reward`
    scores the last response; its parameters are `response` and text fields of the row. Without it
    rewards are 0. Tools may be async. The result of a tool that raises is its error. Raises
    `UsageError` (E620).
    """

    role: ClassVar[str] = "tool"

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        pattern: str = CALL,
        answer: str = "{result}",
        reward: Tool | None = None,
    ) -> None:
        problem = _problem(tools, pattern, answer, reward)
        if problem:
            what = f"tools that cannot be called: {problem}"
            raise UsageError(Finding(code="E620", what=what, where=declared_here()))
        self.tools: Mapping[str, Tool] = {_name(tool): tool for tool in tools}
        self.pattern = re.compile(pattern, re.DOTALL)
        self.answer = answer
        self.reward = reward

    def fields(self) -> tuple[str, ...]:
        """The text fields that the reward reads."""
        if self.reward is None:
            return ()
        return tuple(name for name in inspect.signature(self.reward).parameters if name != SCORED)

    def step(self, state: dict[str, Any], response: str) -> Step:
        """Run the calls of a response one after the other."""
        told = [self._answered(call) for call in self.pattern.finditer(response)]
        if told:
            return Step(observation="\n".join(told), done=False)
        return Step(observation="", done=True, reward=self._scored(state, response))

    def describe(self) -> str:
        """The tools by name, with what differs from the usual."""
        parts = [", ".join(self.tools)]
        parts += [f"pattern={self.pattern.pattern!r}"] if self.pattern.pattern != CALL else []
        parts += [f"answer={self.answer!r}"] if self.answer != "{result}" else []
        parts += [f"reward={_name(self.reward)}"] if self.reward is not None else []
        return f"{type(self).__qualname__}({'; '.join(parts)})"

    def _scored(self, state: Mapping[str, Any], response: str) -> float:
        if self.reward is None:
            return 0.0
        read = {name: state[name] for name in self.fields()}
        if SCORED in inspect.signature(self.reward).parameters:
            read[SCORED] = response
        return number(self.reward(**read))

    def _answered(self, call: re.Match[str]) -> str:
        try:
            result = _run(*self._called(call))
        except Exception as error:
            result = f"error: {error_text(error)}"
        return self.answer.replace("{result}", _text(result))

    def _called(self, call: re.Match[str]) -> tuple[Tool, Any]:
        """The tool that a call names, and its arguments: by name, or one value."""
        groups = call.groupdict()
        if groups:
            name, arguments = groups.get("name"), _plain(groups.get("arguments") or "")
        else:
            said = json.loads(call.group(1))
            if not isinstance(said, dict):
                raise ValueError('expected {"name": ..., "arguments": {...}}')
            name, arguments = said.get("name"), said.get("arguments", said.get("parameters", {}))
        if name is None and len(self.tools) == 1:
            (name,) = self.tools
        if not isinstance(name, str) or name not in self.tools:
            raise ValueError(f"no tool {name!r}; there is {known_names(tuple(self.tools))}")
        return self.tools[name], arguments

    def __getstate__(self) -> dict[str, Any]:
        """Functions by value, for a process that cannot import the file they are declared in."""
        reward = None if self.reward is None else packed_function(self.reward).blob
        return self.__dict__ | {
            "tools": {name: packed_function(tool).blob for name, tool in self.tools.items()},
            "reward": reward,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        tools = {name: pickle.loads(blob) for name, blob in state["tools"].items()}  # noqa: S301
        blob = state["reward"]
        reward = None if blob is None else pickle.loads(blob)  # noqa: S301  packed above
        self.__dict__.update(state | {"tools": tools, "reward": reward})


SCORED = "response"


def _run(tool: Tool, arguments: Any) -> Any:
    made = tool(**arguments) if isinstance(arguments, dict) else tool(arguments)
    return asyncio.run(_waited(made)) if inspect.isawaitable(made) else made


async def _waited(made: Any) -> Any:
    return await made


def _plain(said: str) -> Any:
    """Arguments by name where they are JSON, else the text."""
    try:
        found = json.loads(said)
    except json.JSONDecodeError:
        return said
    return found if isinstance(found, dict) else said


def _text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, default=str)


def _problem(tools: Sequence[Any], pattern: str, answer: str, reward: Any) -> str:
    """What is wrong with an environment's tools; "" for nothing."""
    names = [_name(tool) for tool in tools]
    if not tools:
        return "there is none"
    for name, tool in zip(names, tools, strict=True):
        if not callable(tool):
            return f"{tool!r:.60} is no function"
        if names.count(name) > 1:
            return f"two are called {name}"
    if reward is not None and not callable(reward):
        return f"the reward {reward!r:.60} is no function"
    if "{result}" not in answer:
        return f"answer={answer!r} has no {{result}} in it"
    return _pattern_problem(pattern)


def _pattern_problem(pattern: str) -> str:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        return f"pattern={pattern!r} is no regular expression: {error}"
    if not compiled.groups:
        return f"pattern={pattern!r} has no group for the call"
    unknown: Iterator[str] = (n for n in compiled.groupindex if n not in ("name", "arguments"))
    return next((f"pattern={pattern!r} has a group {name!r}" for name in unknown), "")


def _name(tool: Any) -> str:
    return str(getattr(tool, "__name__", repr(tool)))
