"""Headless Chromium by its DevTools protocol: pages opened, keys pressed, what they said and asked.

The system's Chromium; `RLFLOW_CHROMIUM` names another. Nothing is downloaded.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 60.0


def chromium() -> str | None:
    """The program, None where there is none."""
    named = os.environ.get("RLFLOW_CHROMIUM")
    return named or next((found for found in map(shutil.which, NAMES) if found), None)


class Tab:
    """One page: what it wrote to its console, what it asked a network for, what it evaluates to."""

    def __init__(self, address: str) -> None:
        import websocket

        self._socket = websocket.create_connection(
            address, timeout=SECONDS, suppress_origin=True, max_size=None
        )
        self._last = 0
        self.events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of one command."""
        self._last += 1
        self._socket.send(json.dumps({"id": self._last, "method": method, "params": params}))
        while True:
            found: dict[str, Any] = json.loads(self._socket.recv())
            if found.get("id") == self._last:
                assert "error" not in found, found["error"]
                return found["result"]
            self.events.append(found)

    def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """The value of an expression once it is true."""
        end = time.monotonic() + SECONDS
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.02)
        return value

    def open(self, url: str) -> float:
        """Load a page until its scripts have drawn it; the milliseconds that this took."""
        self.call("Page.navigate", url=url)
        self.until("document.documentElement?.dataset.ready === 'yes'")
        return float(self.run("performance.now()"))

    def look(self, *, dark: bool = False, width: int = 1280, media: str = "") -> None:
        """Another size of the window, another theme, print instead of a screen."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[theme])
        self.run("new Promise((done) => setTimeout(done, 400))")

    def press(self, key: str) -> None:
        """A key, down and up."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def picture(self, path: Path) -> None:
        """The whole page as png."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def printed(self) -> bytes:
        """The page as pdf."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"])

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, and exceptions."""
        found = []
        for event in self.events:
            what = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(what["exceptionDetails"].get("exception", what)))
            elif event["method"] == "Log.entryAdded" and what["entry"]["level"] != "verbose":
                found.append(what["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled" and what["type"] != "log":
                found.append(str(what["args"]))
        return found

    def asked(self) -> set[str]:
        """Every address that was asked for."""
        sent = (e for e in self.events if e["method"] == "Network.requestWillBeSent")
        return {event["params"]["request"]["url"] for event in sent}

    def close(self) -> None:
        """Let go of it."""
        self._socket.close()


@contextmanager
def browsing(profile: Path) -> Iterator[Tab]:
    """A tab of a browser of its own, which ends with the block."""
    program = chromium()
    assert program is not None
    words = (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--no-first-run",
    )
    words += ("--disable-background-networking", "--disable-component-update", "--mute-audio")
    words += ("--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank")
    with subprocess.Popen(
        [program, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            tab = Tab(_address(profile, process))
            yield tab
            tab.close()
        finally:
            process.terminate()


def _address(profile: Path, process: subprocess.Popen[bytes]) -> str:
    """Where the first tab listens; the browser writes its port into its profile."""
    from urllib.request import urlopen

    end, file = time.monotonic() + SECONDS, profile / "DevToolsActivePort"
    while not (file.exists() and len(file.read_text().splitlines()) == 2):
        assert process.poll() is None, "the browser ended"
        assert time.monotonic() < end, "the browser does not listen"
        time.sleep(0.05)
    port = file.read_text().splitlines()[0]
    with urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
        tabs = json.load(answer)
    return str(next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"))
