"""Headless Chromium, driven over the DevTools protocol through a pair of pipes: no port, no driver, no package.

https://chromedevtools.github.io/devtools-protocol/; ``--remote-debugging-pipe`` reads commands from descriptor 3 and
writes answers and events to descriptor 4, each ended by a NUL byte.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")
FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check", "--disable-gpu",
    "--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-quic", "--hide-scrollbars", "--mute-audio", "--force-color-profile=srgb",
)  # fmt: skip
DEADLINE_S = 60.0


def find_chromium() -> str | None:
    """The browser of this machine: ``$CHROMIUM``, or the first of the usual names on the path."""
    names = [os.environ.get("CHROMIUM", ""), *NAMES]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _well_above(descriptor: int) -> int:
    """The same pipe under a number above those at which the browser looks for its pipes."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 20)
    os.close(descriptor)
    return moved


class Chromium:
    """One browser with one page. ``close`` ends it."""

    def __init__(self, binary: str, width: int = 1400, height: int = 1000) -> None:
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        commands, self._to = map(_well_above, os.pipe())
        self._from, answers = map(_well_above, os.pipe())
        root = ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses to start as root with it
        shell = f'exec 3<&{commands} 4>&{answers}; exec "$0" "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, binary, *FLAGS, *root, f"--user-data-dir={self._profile}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=(commands, answers),
        )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self._unread = b""
        self._last_id = 0
        self._session = ""
        self.errors: list[str] = []  # exceptions and console errors of the page
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(one for one in targets if one["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.size(width, height)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)

    # --- what a person does -----------------------------------------------------------------------------------------

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def size(self, width: int, height: int, scale: float = 1.0) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def colour_scheme(self, scheme: str) -> None:
        """``light`` or ``dark``."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def move(self, selector: str, across: float = 0.5) -> None:
        """Put the mouse on an element, so far across it."""
        x, y = self._place(selector, across)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        x, y = self._place(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives. Raises AssertionError if it throws."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def text(self, selector: str = "body") -> str:
        return str(self.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def until(self, expression: str, deadline_s: float = DEADLINE_S) -> Any:
        """Wait until a JavaScript expression is true; its value."""
        deadline = time.monotonic() + deadline_s
        while not (found := self._quietly(expression)):
            assert time.monotonic() < deadline, f"not within {deadline_s:g} s: {expression}; page: {self.text()[:2000]}"
            time.sleep(0.02)
        return found

    def screenshot(self, path: Path) -> None:
        """A PNG of what is in view."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    # --- the protocol -----------------------------------------------------------------------------------------------

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        wanted = self._last_id
        answer = self._read(lambda one: one.get("id") == wanted)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _place(self, selector: str, across: float = 0.5) -> tuple[float, float]:
        box = self.value(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const b = e.getBoundingClientRect();"
            f" return [b.left, b.top, b.width, b.height]; }})(document.querySelector({json.dumps(selector)}))"
        )
        return box[0] + box[2] * across, box[1] + box[3] / 2

    def _quietly(self, expression: str) -> Any:
        """The page may be on its way to another."""
        try:
            return self.value(expression)
        except (AssertionError, RuntimeError):
            return None

    def _read(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            while b"\0" in self._unread:
                raw, self._unread = self._unread.split(b"\0", 1)
                message: dict[str, Any] = json.loads(raw)
                self._note(message)
                if wanted(message):
                    return message
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium did not answer within {DEADLINE_S:g} s"
            piece = os.read(self._from, 1 << 20)
            assert piece, "Chromium has ended"
            self._unread += piece

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            details = message["params"]["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description") or details["text"]))
        elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.errors.append(message["params"]["entry"]["text"] + " " + message["params"]["entry"].get("url", ""))
