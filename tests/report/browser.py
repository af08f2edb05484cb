"""A headless Chromium driven over its debugging pipe, with nothing but the standard library."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """Return the browser named by TURBOGR_CHROMIUM, or one on the PATH, or None."""
    named = os.environ.get("TURBOGR_CHROMIUM")
    if named:
        return named
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((found for name in names if (found := shutil.which(name))), None)


class Browser:
    """One browser process with an empty profile and one page; use as a context manager."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="turbogr-browser-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        def place_pipes() -> None:  # the protocol speaks on descriptors 3 and 4
            reading, writing = os.dup(to_browser), os.dup(from_browser)
            os.dup2(reading, 3)
            os.dup2(writing, 4)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=place_pipes,
            close_fds=False,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result; events that arrive meanwhile are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self, timeout: float = 60.0) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], timeout)
            assert ready, "the browser does not answer"
            chunk = os.read(self._read, 1 << 16)
            assert chunk, "the browser has ended"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, page: Path, *, width: int, height: int = 900, scheme: str = "light", scripts: bool = True) -> None:
        """Load a local page as a screen of that size and colour scheme shows it."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        end = time.monotonic() + 60
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            assert time.monotonic() < end, "the page does not finish loading"
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """Return everything the console or the page complained about since it was opened."""
        found = []
        for event in self.events:
            if event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                found.append(json.dumps(event["params"]))
            if event["method"] == "Runtime.consoleAPICalled" and event["params"]["type"] in ("error", "warning"):
                found.append(json.dumps(event["params"]["args"]))
        return found

    def requests(self) -> list[str]:
        """Return the addresses that the page asked for, itself and data: addresses left out."""
        sent = [e["params"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        urls = [request["request"]["url"] for request in sent if request.get("type") != "Document"]
        return [url for url in urls if not url.startswith("data:")]

    def screenshot(self, path: Path) -> None:
        """Save the whole page as a PNG."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True, **self._whole_page())
        path.write_bytes(base64.b64decode(answer["data"]))

    def _whole_page(self) -> dict[str, Any]:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def close(self) -> None:
        """End this browser and its own children, and remove its profile."""
        os.close(self._write)
        os.close(self._read)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
