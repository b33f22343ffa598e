"""A server in a process of its own, as users start it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

_COMMAND = "from forerun.cli.main import run; run()"
_ROOT = Path(__file__).parents[2]


class ServedProcess:
    """`forerun serve`; use it as a context.

    Args:
        arguments: of the command; `--port 0` is added.
        environment: variables to set.
    """

    def __init__(self, *arguments: str, **environment: str) -> None:
        command = [sys.executable, "-c", _COMMAND, "serve", *arguments]
        if "--port" not in arguments:
            command += ["--port", "0"]
        python_path = os.pathsep.join([str(_ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": python_path} | environment, text=True
        )
        self.log: list[str] = []
        self.url = ""

    def __enter__(self) -> ServedProcess:
        return self

    def __exit__(self, *details: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def until_bound(self) -> ServedProcess:
        """Waits until the port is known."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.log.append(line)
            if found := re.search(r"http://[^ /]+", line):
                self.url = found[0]
                return self
        raise AssertionError("".join(self.log))

    def until_ready(self, timeout_s: float = 60.0) -> ServedProcess:
        """Waits until requests are answered."""
        self.until_bound()
        until = time.monotonic() + timeout_s
        while self.status("/health") != 200:
            assert time.monotonic() < until
            assert self._process.poll() is None, self.end()
            time.sleep(0.05)
        return self

    def status(self, path: str) -> int:
        """The status of a GET."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code

    def get(self, path: str) -> Any:
        """A GET's JSON, or text."""
        with urllib.request.urlopen(self.url + path, timeout=10) as reply:
            text = reply.read().decode()
        return json.loads(text) if text.startswith("{") else text

    def post(self, path: str, body: Any) -> Any:
        """A POST's JSON."""
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Sends the process a signal."""
        self._process.send_signal(number)

    def end(self, timeout_s: float = 20.0) -> tuple[int, str]:
        """Waits for the exit; the code and what was logged."""
        _, rest = self._process.communicate(timeout=timeout_s)
        return self._process.returncode, "".join([*self.log, rest])
