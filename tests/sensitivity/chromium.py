"""A headless Chromium, driven by its DevTools protocol through a pair of pipes: no driver, no network."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 120.0  # seconds, with a busy machine
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
    *("--no-first-run", "--hide-scrollbars", "--disable-extensions", "--disable-background-networking"),
)


def found() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page of one browser. events: what it said, by method, in order."""

    def __init__(self, program: str, home: Path) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'  # the protocol's own numbers
        self._process = subprocess.Popen(
            ["bash", "-c", command, program, *FLAGS, f"--user-data-dir={home}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._buffer, self._number, self._session = b"", 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility", "DOM"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(PATIENCE)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._in)
            os.close(self._out)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self._in, 1 << 16) if ready else b""
            if not part:
                raise TimeoutError(f"the browser says nothing, exit status {self._process.poll()}")
            self._buffer += part
        content, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(content)
        if "method" in message:
            self.events.append((message["method"], message["params"]))
        return message

    # ---- what tests say ------------------------------------------------------------------------------

    def open(self, file: Path, width: int = 1200, scheme: str = "light") -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self.prefer(scheme)
        self.events.clear()
        self.call("Page.navigate", url=file.as_uri())
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            self._read()

    def prefer(self, scheme: str, media: str = "") -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def value(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, element: str) -> None:
        """With the mouse, in the middle of what the expression gives."""
        self.value(f"{element}.scrollIntoView({{block: 'center', inline: 'center', behavior: 'instant'}})")
        box = self.value(f"{element}.getBoundingClientRect().toJSON()")
        place = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", buttons=1, clickCount=1
            )

    def press(self, key: str, text: str = "") -> None:
        codes = {"Enter": 13, "Tab": 9}
        for kind in ("keyDown", "keyUp"):
            how = {"text": text} if kind == "keyDown" and text else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=codes[key], **how)

    def complaints(self) -> list[Any]:
        """Errors, and anything that was loaded from elsewhere than the page."""
        methods = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Network.loadingFailed")
        said = [(method, what) for method, what in self.events if method in methods]
        asked = [what["request"]["url"] for method, what in self.events if method == "Network.requestWillBeSent"]
        return said + [url for url in asked if not url.startswith(("file:", "data:"))]
