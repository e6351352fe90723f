"""What is named like a key is never written: arguments of a command, values, fields of rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from rlflow.runtime.record.durable import JSON

HIDDEN = "***"
# Parts of a name that make it a key's wherever they stand, in fields of rows too.
SECRET = re.compile(
    r"(?i)(api|access|secret|private|auth|signing|account)[_-]?key|secret|passw(or)?d|passphrase"
    r"|credential|(api|access|auth|bearer|hf|hub|github|refresh|session)[_-]?token(?!s)|^token$"
)
# Words of a name that make it the key of a service, or of a person; of rows they may be data.
WORDS = re.compile(
    r"(?:api)?keys?|token|passwords?|pwd|credentials?|auth|authorization|bearer|cookies?|dsn"
)
# A token of a text, which is none of a service.
TEXT_TOKEN = re.compile(
    r"(?i)\b(?:eos|bos|pad|unk|mask|sep|cls|stop|start|end|first|last|next|special|per)[_-]token\b"
)
SAID = re.compile(r"(?P<name>-{0,2}[\w.-]+)=.+", re.DOTALL)
# Values that are keys whatever they are named: those of hubs.
KEYS = re.compile(r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abprs]-|AKIA)[A-Za-z0-9_-]{12,}")
IN_ADDRESS = re.compile(r"://[^/@\s:]*:[^/@\s]+@")


@lru_cache(maxsize=4096)
def is_secret(field: str) -> bool:
    """Whether a field of rows is named like a key."""
    return SECRET.search(field) is not None


def named_like_a_key(name: str) -> bool:
    """Whether a name of a value, an argument or a variable is one of a key: hfToken, DB-PWD."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", TEXT_TOKEN.sub("", name))
    words = re.split(r"[^a-z0-9]+", apart.lower())
    return is_secret(name) or any(WORDS.fullmatch(word) for word in words)


def looks_like_a_key(value: str) -> bool:
    """Whether a value has a key in it, or an address with a password, whatever it is named."""
    return KEYS.search(value) is not None or IN_ADDRESS.search(value) is not None


def without_secrets(words: Sequence[str]) -> list[str]:
    """The words of a command, with what is named like a key hidden: `--set api_key=***`."""
    found: list[str] = []
    hide = False
    for word in words:
        said = SAID.fullmatch(word)
        if hide:
            found.append(HIDDEN)
        elif said is not None and named_like_a_key(said["name"]):
            found.append(f"{said['name']}={HIDDEN}")
        else:
            found.append(KEYS.sub(HIDDEN, IN_ADDRESS.sub(f"://{HIDDEN}@", word)))
        named = not hide and word.startswith("--") and "=" not in word
        hide = named and named_like_a_key(word)
    return found


def hidden_values(values: Mapping[str, JSON]) -> dict[str, JSON]:
    """Values by name, those that are named like a key or look like one hidden, nested ones too."""
    return {name: _hidden(name, value) for name, value in values.items()}


def hidden_facts(facts: Mapping[str, JSON]) -> dict[str, JSON]:
    """Facts of a run with the words of its commands as they may be seen, of each start."""
    found = dict(facts)
    for name in found.keys() & {"command", "again"}:
        words = found[name]
        if isinstance(words, list | tuple):
            found[name] = [*without_secrets([str(word) for word in words])]
    starts = found.get("resumed")
    if isinstance(starts, list | tuple):
        found["resumed"] = [hidden_facts(s) if isinstance(s, Mapping) else s for s in starts]
    return found


def _hidden(name: str, value: JSON) -> JSON:
    if isinstance(value, Mapping):
        return hidden_values(value)
    if value not in (None, "") and named_like_a_key(name):
        return HIDDEN
    if isinstance(value, list | tuple):
        return [_hidden(name, each) for each in value]
    if not isinstance(value, str):
        return value
    return KEYS.sub(HIDDEN, IN_ADDRESS.sub(f"://{HIDDEN}@", value))
