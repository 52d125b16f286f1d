"""A headless Chromium, driven through a pipe with its DevTools protocol: it needs no package and opens no port."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT_S = 30.0
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
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "Home": 36, "End": 35}


class Browser:
    """One page of a browser process with a folder of its own; as a context manager it ends the process and removes the
    folder.

    `problems` has the exceptions of the page and the errors in its console.
    """

    def __init__(self, program: str = "chromium") -> None:
        self.problems: list[str] = []
        self._folder = tempfile.mkdtemp(prefix="ui-browser-")
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        command = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        arguments = [shutil.which(program) or program, *FLAGS, f"--user-data-dir={self._folder}", "about:blank"]
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", command, *arguments], pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._next_id = 0
        self._session: str | None = None
        self._rest = b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        # The browser ends its other processes. If only the first one is killed, they write to the folder later.
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            os.write(self._to, b'{"id": 0, "method": "Browser.close"}\0')
            self._process.wait(TIMEOUT_S)
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method and return its result; events that arrive before it are checked for problems."""
        self._next_id += 1
        message: dict[str, Any] = {"id": self._next_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._next_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._from, 2**20)
            if not piece:
                raise RuntimeError("the browser has ended")
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return dict(message)

    def _note(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and parameters["type"] == "error":
            self.problems.append(str(parameters["args"]))

    # --- actions of a user
    # ------------------------------------------------------------------------------------------------

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def run(self, code: str) -> Any:
        """Return the value of an expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True, userGesture=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{code}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, code: str, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until an expression is true."""
        self._until(lambda: self.run(f"Boolean({code})"), code, timeout_s)

    def _until(self, value: Callable[[], Any], what: str, timeout_s: float) -> Any:
        end = time.monotonic() + timeout_s
        while not (found := value()):
            if time.monotonic() > end:
                raise AssertionError(f"never came true: {what}; problems: {self.problems}")
            time.sleep(0.05)
        return found

    def click(self, selector: str) -> None:
        """Click in the middle of the first visible element of a selector."""
        x, y = self._middle(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, selector: str) -> None:
        x, y = self._middle(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _middle(self, selector: str) -> tuple[float, float]:
        """Return the middle of the first visible element, once it has stopped moving: a page that loads moves its
        elements.
        """
        code = f"""(async () => {{
            const node = document.querySelector({json.dumps(selector)});
            if (!node) return null;
            node.scrollIntoView({{block: "center", behavior: "instant"}});
            const before = node.getBoundingClientRect();
            await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
            const at = node.getBoundingClientRect();
            const x = at.x + at.width / 2, y = at.y + at.height / 2;
            return at.width && at.x === before.x && at.y === before.y ? [x, y] : null;
        }})()"""
        x, y = self._until(lambda: self.run(code), selector, TIMEOUT_S)
        return x, y

    def type(self, selector: str, text: str) -> None:
        """Replace the content of a field."""
        self.wait_for(f"document.querySelector({json.dumps(selector)})")
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.run(f"document.querySelector({json.dumps(selector)}).select?.()")
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        text = {"Enter": "\r"}.get(key)
        about = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]} | ({"text": text} if text else {})
        self.call("Input.dispatchKeyEvent", type="keyDown", **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def text(self, selector: str = "body") -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    # --- appearance
    # -------------------------------------------------------------------------------------------------------

    def look(self, *, width: int = 1360, height: int = 860, dark: bool = False, scale: float = 1.0) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def save(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
