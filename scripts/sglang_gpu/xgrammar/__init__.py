"""Stands in for xgrammar, 43 MB for grammars that no rollout has: SGLang imports a type of it."""

from __future__ import annotations

from typing import Any

StructuralTag = dict[str, Any]
