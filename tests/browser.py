"""A real browser for the tests, driven through chromedriver's HTTP interface: no package is needed."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_ANSWER_S = 120.0


def find_browser() -> tuple[str, str]:
    """Return the browser and its driver; without them skip, or fail with RLSP_BROWSER=required, as in CI."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if browser and driver:
        return browser, driver
    lacking = "no Chromium with chromedriver on PATH (Debian: apt-get install chromium chromium-driver)"
    if os.environ.get("RLSP_BROWSER") == "required":
        pytest.fail(f"RLSP_BROWSER=required, but there is {lacking}")
    pytest.skip(lacking)


class Browser:
    """One headless browser with a profile of its own in `home`; ended with the context."""

    def __init__(self, home: Path) -> None:
        browser, driver = find_browser()
        self._log = (home / "driver.log").open("wb+")
        self._process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=self._log)
        try:
            self._root = f"http://127.0.0.1:{self._port()}/session"
            options = {"binary": browser, "args": [*_QUIET, f"--user-data-dir={home / 'profile'}"]}
            wanted = {
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            }
            session = self._ask("", {"capabilities": {"alwaysMatch": wanted}})
            self._root += f"/{session['sessionId']}"
            self._ask("/url", {"url": "about:blank"})
            self.requests()  # the browser's own first page asked for these
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._ask("", None, method="DELETE")
        finally:
            self._stop()

    def show(self, page: Path, width: int, height: int, scheme: str) -> None:
        """Open a file in a viewport of this size, in pixels, preferring the colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._command("Emulation.setDeviceMetricsOverride", size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._command("Emulation.setEmulatedMedia", {"features": [feature]})
        self._ask("/url", {"url": page.resolve().as_uri()})

    def run(self, script: str) -> Any:
        """Run JavaScript in the page and return what it returns."""
        return self._ask("/execute/sync", {"script": script, "args": []})

    def screenshot(self, *, whole: bool = False) -> bytes:
        """Return a PNG of the viewport, or of the whole page."""
        shot = self._command("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})
        return base64.b64decode(shot["data"])

    def complaints(self) -> list[str]:
        """Return what stands in the console since the last call, the browser's own errors among it."""
        return [entry["message"] for entry in self._ask("/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """Return the addresses that were asked for since the last call."""
        events = [json.loads(entry["message"]) for entry in self._ask("/se/log", {"type": "performance"})]
        return [
            event["message"]["params"]["request"]["url"]
            for event in events
            if event["message"]["method"] == "Network.requestWillBeSent"
        ]

    def _command(self, name: str, parameters: dict[str, Any]) -> Any:
        return self._ask("/goog/cdp/execute", {"cmd": name, "params": parameters})

    def _port(self) -> int:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := re.search(rb"started successfully on port (\d+)", line):
                return int(found.group(1))
        raise RuntimeError("chromedriver did not start")

    def _ask(self, path: str, body: dict[str, Any] | None, method: str = "POST") -> Any:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(
            self._root + path, data, {"Content-Type": "application/json"}, method=method
        )
        # No proxy of the environment may stand between the test and its own machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=_ANSWER_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise RuntimeError(f"chromedriver: {error.read().decode(errors='replace')}") from None

    def _stop(self) -> None:
        self._process.terminate()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()
