"""Findings about the options of episodes: what is out of range, and what would do nothing."""

from __future__ import annotations

from typing import get_args

from rlflow.envs import Environment
from rlflow.errors import Finding, near_names
from rlflow.graph.source import declared_at
from rlflow.rewards.bounds import PLAIN, Bounds


def _wrong(what: str, expected: str, near: tuple[str, ...] = ()) -> Finding:
    return Finding(code="E622", what=what, where=declared_at(), expected=expected, near=near)


def _checked(rules: tuple[tuple[bool, str, str], ...]) -> list[Finding]:
    return [_wrong(what, expected) for holds, what, expected in rules if not holds]


def no_environment(environment: object) -> list[Finding]:
    """A finding for what is no environment."""
    if isinstance(environment, Environment):
        return []
    fix = "class Mine(rf.Environment): ..."
    made = (
        f", the class: {environment.__name__}() makes one" if isinstance(environment, type) else ""
    )
    return [
        Finding(
            code="E626",
            what=f"{environment!r:.80} is no environment{made}",
            where=declared_at(),
            expected="an object of a class derived from rf.Environment",
            fix="" if made else fix,
        )
    ]


def no_choice(option: str, given: str, choices: object) -> list[Finding]:
    """A finding for a word that is not among the choices, a `Literal`."""
    known = get_args(choices)
    if given in known:
        return []
    near = near_names(str(given), known)
    return [_wrong(f"{option}={given!r}", " or ".join(map(repr, known)), near)]


def bad_bounds(bounds: Bounds) -> list[Finding]:
    """Findings about how steps are called."""
    limit, most = bounds.timeout, bounds.concurrency
    return _checked(
        (
            (limit is None or limit > 0, f"timeout={limit}", "timeout > 0, in seconds"),
            (most is None or most >= 1, f"concurrency={most}", "concurrency >= 1"),
            (bounds.retries >= 0, f"retries={bounds.retries}", "retries >= 0"),
            (
                bounds.backoff >= 0 and (bounds.backoff == PLAIN.backoff or bounds.retries > 0),
                f"backoff={bounds.backoff} with retries={bounds.retries}",
                "backoff >= 0, in seconds, and retries >= 1 with it",
            ),
        )
    )


def bad_limits(max_new_tokens: int, max_tokens: int) -> list[Finding]:
    """Findings about the tokens of a turn and of an episode."""
    return _checked(
        (
            (max_new_tokens >= 1, f"max_new_tokens={max_new_tokens}", "max_new_tokens >= 1"),
            (
                max_tokens > max_new_tokens,
                f"max_tokens={max_tokens} of an episode with turns of {max_new_tokens}",
                "room for two turns and what is told in between",
            ),
        )
    )


def bad_turns(max_turns: int, expected: float | None) -> list[Finding]:
    """Findings about the number of turns."""
    return _checked(
        (
            (max_turns >= 1, f"max_turns={max_turns}", "max_turns >= 1"),
            (
                expected is None or 1 <= expected <= max_turns,
                f"expected={expected}",
                f"1 <= expected <= max_turns={max_turns}",
            ),
        )
    )


def bad_shares(
    max_truncated: float | None, max_failures: float | None, failed: str, *, fails: bool
) -> list[Finding]:
    """Shares out of range, and what is said of failures where a failure stops the run."""
    shares = {"max_truncated": max_truncated, "max_failures": max_failures}
    asked = failed != "keep" or max_failures is not None
    return _checked(
        (
            *(
                (share is None or 0 <= share <= 1, f"{key}={share}", "a share from 0 to 1")
                for key, share in shares.items()
            ),
            (
                fails or not asked,
                f"failed={failed!r}, max_failures={max_failures}: failures stop the run",
                'on_error="end", or a policy that drops; without it a failure stops the run',
            ),
        )
    )
