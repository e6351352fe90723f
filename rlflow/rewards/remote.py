"""A judge behind an address: one JSON request a sample, one JSON answer with its reward.

HTTP/1.1 over asyncio, one connection a request, no redirects and no proxies. This file knows
no retries and no time limits: those are of `ops.reward`, whose cancelling closes the connection.
"""

from __future__ import annotations

import asyncio
import http.client
import inspect
import io
import json
import ssl
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from rlflow.errors import Finding, UsageError
from rlflow.rewards.bounds import Unscorable

AGAIN = frozenset({408, 425, 429})
MOST = 2**20
SHOWN = 200


class JudgeError(RuntimeError):
    """The judge gave no answer that can be used; another attempt may."""


class HTTPJudge:
    """A reward function that asks a server.

    Each of `fields` is sent under its own name, or that of a mapping {field: name in the
    request}, beside what `extra` holds. The reward is at `score` in the answer: a name, or a
    path such as `choices.0.score`. `headers` are sent as they are, an API key among them.

    Statuses 408, 425, 429 and from 500 up fail, so that `retries` try again; any other but
    200 to 299 is an `Unscorable`. Raises UsageError (E287) for an address that is not one.
    """

    def __init__(
        self,
        url: str,
        *,
        fields: Sequence[str] | Mapping[str, str] = ("prompt", "response"),
        score: str = "score",
        extra: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        parts = urlsplit(url)
        named = parts.username is None and bool(parts.hostname)
        if parts.scheme not in ("http", "https") or not named:
            raise UsageError(
                Finding(
                    code="E287",
                    what=f"a judge at {parts.scheme or 'no scheme'}://{parts.hostname or ''}",
                    expected="an address such as http://127.0.0.1:8000/score, names and keys in "
                    "headers=",
                )
            )
        self.url = url
        self.names = dict(fields) if isinstance(fields, Mapping) else {f: f for f in fields}
        self.score = score
        self.extra = dict(extra or {})
        self.headers = dict(headers or {})
        self._host, self._secure = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        self._netloc = parts.netloc
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self.__name__ = self.__qualname__ = (
            f"HTTPJudge({parts.scheme}://{self._netloc}{parts.path})"
        )
        self.__annotations__ = dict.fromkeys(self.names, str) | {"return": float}
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, kind, annotation=str) for name in self.names]
        )

    async def __call__(self, **sample: Any) -> Any:
        """The value at `score` in the server's answer, whatever it is."""
        body = {**self.extra, **{self.names[name]: value for name, value in sample.items()}}
        status, answer = await self._post(json.dumps(body).encode())
        shown = answer[:SHOWN].decode(errors="replace")
        if status in AGAIN or status >= 500:
            raise JudgeError(f"status {status}: {shown}")
        if not 200 <= status < 300:
            raise Unscorable(f"status {status}: {shown}")
        try:
            found: Any = json.loads(answer)
        except ValueError as error:
            raise JudgeError(f"the answer is no JSON ({error}): {shown}") from None
        for key in self.score.split("."):
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, IndexError, TypeError, ValueError):
                raise JudgeError(f"the answer has no {self.score!r}: {shown}") from None
        return found

    async def _post(self, body: bytes) -> tuple[int, bytes]:
        context = ssl.create_default_context() if self._secure else None
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=context)
        try:
            writer.write(self._request(body))
            await writer.drain()
            return await _answer(reader)
        finally:
            writer.close()

    def _request(self, body: bytes) -> bytes:
        headers = {
            "Host": self._netloc,
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "Connection": "close",
            "Content-Length": str(len(body)),
        } | self.headers
        lines = [f"POST {self._path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class _Received:
    """Bytes that `http.client` reads as if they came from a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of an answer of at most 1 MiB; raises JudgeError where it is not whole."""
    data = b""
    while part := await reader.read(65536):
        data += part
        if len(data) > MOST:
            raise JudgeError("the answer is longer than 1 MiB")
        if _whole(data):
            break
    response = http.client.HTTPResponse(_Received(data))  # type: ignore[arg-type]
    try:
        response.begin()
        return response.status, response.read()
    except (http.client.HTTPException, ValueError) as error:
        raise JudgeError(f"the answer is cut short: {type(error).__name__}") from None


def _whole(data: bytes) -> bool:
    """Whether all that the header announces has come, where it says how much that is."""
    header, mark, body = data.partition(b"\r\n\r\n")
    for line in header.lower().split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if mark and name == b"content-length" and value.strip().isdigit():
            return len(body) >= int(value)
    return False
