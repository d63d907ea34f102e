"""Headless Chromium for the tests of pages, by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--disable-quic",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--remote-debugging-pipe", "--window-size=1100,900",
)  # fmt: skip


class Browser:
    """Chromium, by its DevTools protocol over a pipe: JSON, each message ended by a zero byte."""

    def __init__(self, chromium: str, profile: Path) -> None:
        self._in, ours = os.pipe()
        theirs, self._out = os.pipe()

        def place() -> None:  # the protocol's descriptors in the child: 3 to read from, 4 to write to
            read, write = os.dup(theirs), os.dup(ours)
            os.dup2(read, 3)
            os.dup2(write, 4)

        command = [chromium, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            command, preexec_fn=place, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs)
        os.close(ours)
        self._number, self._rest, self._session = 0, b"", ""
        targets = self.ask("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self.ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]

    def ask(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                part = os.read(self._in, 1 << 16)
                assert part, "Chromium has ended"
                self._rest += part
            line, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def evaluate(self, expression: str) -> Any:
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def open_tab(self, url: str) -> str:
        """Open and use another tab, and return the name of the previous one."""
        session, self._session = self._session, ""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.ask("Page.navigate", url=url)
        return session

    def use(self, tab: str) -> str:
        """Switch to another tab, and return the name of the previous one."""
        tab, self._session = self._session, tab
        return tab

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
