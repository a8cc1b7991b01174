"""Chromium without a window, spoken to over a pipe; needs nothing but the binary."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any, Self

ANSWER_S_MAX = 60.0
# The protocol wants to read from descriptor 3 and to write to descriptor 4.
REWIRE = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'


class Browser:
    """One page of one browser; ends with the ``with`` block."""

    def __init__(self, path: str, profile: str) -> None:
        theirs_in, self._write = os.pipe()
        self._read, theirs_out = os.pipe()
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
        self._process = subprocess.Popen(
            # bash: dash takes one digit only as a descriptor.
            ["bash", "-c", REWIRE, "bash", str(theirs_in), str(theirs_out), path, *flags,
             f"--user-data-dir={profile}"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._number = 0
        self._seen = b""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._page = attached["sessionId"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(ANSWER_S_MAX)
        os.close(self._read)
        os.close(self._write)

    def open(self, url: str) -> None:
        """Go to ``url``."""
        self._call("Page.navigate", self._page, url=url)

    def before(self, script: str) -> None:
        """Run ``script`` at the beginning of each page from here on."""
        self._call("Page.enable", self._page)
        self._call("Page.addScriptToEvaluateOnNewDocument", self._page, source=script)

    def value(self, expression: str) -> Any:
        """Return what the expression gives in the page; of a promise, what becomes of it."""
        answer = self._call(
            "Runtime.evaluate",
            self._page,
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
        )
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Return once the expression is true in the page."""
        ends = time.monotonic() + ANSWER_S_MAX
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < ends, (expression, self.value("document.body?.innerText"))
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Press and release a key that writes nothing, by its name."""
        for kind in ("rawKeyDown", "keyUp"):
            code = {"Tab": 9}[key]
            self._call(
                "Input.dispatchKeyEvent", self._page,
                type=kind, key=key, code=key, windowsVirtualKeyCode=code,
            )  # fmt: skip

    def look(self, *, width: int, height: int, dark: bool) -> None:
        """Have a screen of that size, and of these colours, from here on."""
        self._call(
            "Emulation.setDeviceMetricsOverride", self._page,
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", self._page, features=[feature])

    def photograph(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        shot = self._call(
            "Page.captureScreenshot", self._page, format="png", captureBeyondViewport=True
        )
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, page: str = "", **params: object) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        text = json.dumps({**message, "sessionId": page} if page else message)
        os.write(self._write, text.encode() + b"\0")
        ends = time.monotonic() + ANSWER_S_MAX
        while True:
            while b"\0" not in self._seen:
                ready, _, _ = select.select([self._read], [], [], ends - time.monotonic())
                more = os.read(self._read, 1 << 20) if ready else b""
                assert more, f"the browser does not answer {method}"
                self._seen += more
            one, self._seen = self._seen.split(b"\0", 1)
            answer = json.loads(one)
            if answer.get("id") == self._number:
                assert "result" in answer, f"the browser refuses {method}: {answer}"
                return dict(answer["result"])
