"""Reading `config.json`: values by any of their names, of the text part where there are several."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlflow.errors import Finding, UsageError


def read_config(directory: Path) -> dict[str, Any]:
    """What a model's `config.json` says. Raises UsageError (E205) where that is not JSON."""
    path = directory / "config.json"
    try:
        found = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(Finding(code="E205", what=f"{path} is not JSON: {error}")) from None
    if not isinstance(found, dict):
        raise UsageError(Finding(code="E205", what=f"{path} is no JSON object"))
    return found


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model, of a model that is more than one."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def text_value(config: Mapping[str, Any], *names: str) -> int:
    """A number by the first of its names that is there; 0 where none is."""
    text = text_config(config)
    return next((_number(text[name]) for name in names if text.get(name) is not None), 0)


def _number(value: Any) -> int:
    """A number; the largest where a config says one for each layer."""
    return max(map(int, value), default=0) if isinstance(value, list) else int(value)


def required(config: Mapping[str, Any], path: Path) -> Callable[..., int]:
    """A function that gives a number by the first of its names; UsageError (E205) for none."""

    def get(*names: str) -> int:
        for name in names:
            if name in config:
                return _number(config[name])
        raise UsageError(
            Finding(
                code="E205",
                what=f"{path} has no {' or '.join(names)}",
                expected="the config.json of a Hugging Face causal language model",
            )
        )

    return get
