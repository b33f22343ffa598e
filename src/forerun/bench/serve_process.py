"""A server as a process of its own, for as long as it is measured: forerun's, or anybody's."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.request import urlopen

from forerun.errors import ConfigError, one_line

_ADDRESS = re.compile(r"http://[\w.\[\]:-]+:\d+")
_PROGRAM = "from forerun.cli.main import run; run()"
_START_S = 300.0
_STOP_S = 20.0
_POLL_S = 0.1
_CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def forerun_serve(model: str, options: Sequence[str] = (), port: int = 0) -> list[str]:
    """The command of this forerun's own server on a port of this machine; 0 lets the system choose."""
    return [
        sys.executable, "-c", _PROGRAM, "serve", model, "--host", "127.0.0.1", "--port", str(port), *options,
    ]  # fmt: skip


class ServerProcess:
    """A server that ends with the block.

    Args:
        name: for messages.
        command: starts it.
        env: variables beside this process's own.
        address: where it will answer; None reads that from what it prints.
    """

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None, address: str | None = None
    ) -> None:
        self.name = name
        self.address = address or ""
        self._last_lines: deque[str] = deque(maxlen=40)
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that what it starts ends with it
        )
        # It must never wait for somebody to read what it prints.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_ready(self, timeout_s: float = _START_S) -> str:
        """The address, once /health says that all is well.

        Raises:
            ConfigError: it ended, or took too long; the message has its last line.
        """
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                self._reader.join(1.0)
                raise ConfigError(f"{self.name} ended with status {self._process.returncode}: {self._last_line()}")
            if self.address and _is_healthy(self.address):
                return self.address
            time.sleep(_POLL_S)
        raise ConfigError(f"{self.name} was not ready after {timeout_s:g} seconds: {self._last_line()}")

    def cpu_seconds(self) -> float:
        """Processor time so far of it and of all it has started; the clock ticks every 10 ms."""
        return sum(_cpu_ticks(pid) for pid in _session_pids(self._process.pid)) / _CLOCK_TICKS_PER_S

    def resident_bytes(self) -> int:
        """Memory of it that is in use, without what it has started."""
        fields = Path(f"/proc/{self._process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def pause(self) -> None:
        """Takes the processors from it and all it has started: some servers poll while nobody asks them anything."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Gives them back."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """Asks it to end, and ends it when it doesn't."""
        with suppress(ProcessLookupError):
            self.resume()
        self._process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        finally:
            # Also what it may have left behind.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._reader.join(_STOP_S)
            assert self._process.stdout is not None
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._last_lines.append(line)
            if not self.address and (found := _ADDRESS.search(line)):
                self.address = found[0]

    def _last_line(self) -> str:
        return one_line(next((line for line in reversed(list(self._last_lines)) if line.strip()), "it said nothing"))


def _is_healthy(address: str) -> bool:
    try:
        with urlopen(f"{address}/health", timeout=5.0) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _session_pids(leader: int) -> Iterator[int]:
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                if os.getsid(int(path.name)) == leader:
                    yield int(path.name)
            except OSError:  # ended meanwhile
                continue


def _cpu_ticks(pid: int) -> int:
    try:
        # The second field is the program's name in parentheses and may hold spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])
