"""Where prompts come from, exposed as `rf.data`; nothing heavy is imported until rows are read.

    arithmetic(digits=2)              problems with a held-out test split
    generator(fn, size=..., columns=...)   a function of the row's index
    jsonl(path), parquet(path)        files
    huggingface(name, split=...)      a data set of the hub, or of a local folder or file
    shapes(question="colour")         drawn pictures, each with a question
    mix({name: source}, weights)      several sources, in proportion
    Chat(tools=..., template=...)     how prompts go through a chat template (also `rf.Chat`)
    answers.*                         text utilities for reward functions

This package knows neither tokens nor tensors, and nothing of graphs or runs.
"""

from __future__ import annotations

from rlflow.data import answers
from rlflow.data.answers import extract_boxed, extract_gsm8k, last_number, same_number
from rlflow.data.chat import Chat
from rlflow.data.files import jsonl, parquet
from rlflow.data.generators import arithmetic, generator
from rlflow.data.hub import huggingface
from rlflow.data.mixing import Mix, mix
from rlflow.data.paths import declared_here, find_path, resolve_path
from rlflow.data.pictures.drawing import shapes
from rlflow.data.sources import DataSource, Row
from rlflow.strict import strict

__all__ = [
    "Chat",
    "DataSource",
    "Mix",
    "Row",
    "answers",
    "arithmetic",
    "extract_boxed",
    "extract_gsm8k",
    "find_path",
    "generator",
    "huggingface",
    "jsonl",
    "last_number",
    "mix",
    "parquet",
    "resolve_path",
    "same_number",
    "shapes",
]

for _name in ("arithmetic", "generator", "huggingface", "jsonl", "mix", "parquet", "shapes"):
    globals()[_name] = strict(where=declared_here)(globals()[_name])
