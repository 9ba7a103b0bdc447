"""A browser that a test looks at and acts on, through the DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-extensions",
    "--no-first-run",
    "--remote-debugging-pipe",
)

_BEYOND = 10
"""Descriptors from here on; 3 and 4 are those that the browser expects."""


class Browser:
    """One page in a browser."""

    def __init__(self, commands: IO[bytes], answers: IO[bytes]) -> None:
        self._commands, self._answers = commands, answers
        self._numbers = itertools.count(1)
        self._unread = b""
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]

    def resize(self, width: int, height: int = 900, *, is_phone: bool = False) -> None:
        """Lay the page out in a window of this size, as a phone does or not."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=is_phone,
        )

    def open(self, url: str) -> None:
        """Begin to load a page."""
        self._call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page, awaited if it is a promise."""
        done = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait_until(self, condition: str, timeout_s: float = 60.0) -> None:
        """Wait until an expression is true in the page, which changes by itself."""
        ended = self.evaluate(
            f"""new Promise(done => {{
              const ends = Date.now() + {1000 * timeout_s};
              const look = () => {{
                let is = false;
                try {{ is = Boolean({condition}) }} catch (error) {{}}
                if (is || Date.now() > ends) done(is); else setTimeout(look, 50);
              }};
              look();
            }})"""
        )
        assert ended, f"not within {timeout_s:g} s: {condition}; shown: {self.text()}"

    def text(self) -> str:
        """What the page shows."""
        return str(self.evaluate("document.body.innerText"))

    def screenshot(self, file: Path) -> None:
        """Write what the page looks like, in its full length, as PNG."""
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **arguments: Any) -> Any:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while (answer := self._next_message()).get("id") != number:
            pass  # an event
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _next_message(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            data = os.read(self._answers.fileno(), 65536)
            assert data, "the browser has ended"
            self._unread += data
        first, _, self._unread = self._unread.partition(b"\0")
        found: dict[str, Any] = json.loads(first)
        return found


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with an empty page, which keeps its files in this folder, until the end."""
    (its_commands, commands), (answers, its_answers) = os.pipe(), os.pipe()
    theirs = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _BEYOND) for one in (its_commands, its_answers)]
    # bash, as the simple shells redirect no descriptor above 9.
    pipes = f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}'
    command = ["bash", "-c", pipes, "bash", "chromium", *_OPTIONS, f"--user-data-dir={folder}"]
    process = subprocess.Popen(
        command,
        pass_fds=theirs,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for one in (its_commands, its_answers, *theirs):
        os.close(one)
    with process, open(commands, "wb") as writing, open(answers, "rb", buffering=0) as reading:
        try:
            yield Browser(writing, reading)
        finally:
            writing.close()  # it ends then
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
