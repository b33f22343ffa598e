"""JSON lines between a benchmark and its workers: one process per engine and setting, each in its own environment.

Standard library only: `serve` runs under the interpreter of whatever is measured. It owns a private copy of standard
output, so nothing that a library prints can end up between two answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LOG_TAIL_LINES = 12

Handler = Callable[..., dict[str, Any]]


def serve(handlers: dict[str, Handler]) -> None:
    """Answers requests `{"op": name, ...arguments}` line by line until standard input ends.

    An answer is the handler's dictionary with `"ok": true`, or `{"ok": false, "error": text}`.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints, also those of C code, join standard error
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("op")
        try:
            answer = {"ok": True, **handlers[name](**request)}
        except Exception as error:
            traceback.print_exc()
            answer = {"ok": False, "error": f"{name}: {type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class WorkerError(Exception):
    """A worker could not do what it was asked, or ended."""


class Worker:
    """A worker process: one module of `benchmarks`, run by the given interpreter from the checkout's root."""

    def __init__(self, name: str, python: Path, module: str, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed with it
        self._process = subprocess.Popen(
            [str(python), "-m", module],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """One request and its answer. Raises WorkerError when the worker reports an error or is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self._process.wait()
            raise WorkerError(f"{self.name} ended with status {status} during {op}:\n{self._log_tail()}")
        answer: dict[str, Any] = json.loads(line)
        if not answer.pop("ok"):
            raise WorkerError(f"{self.name}: {answer['error']}\n{self._log_tail()}")
        return answer

    def cpu_seconds(self) -> float:
        """Processor time of the worker so far, all threads; the clock ticks every 10 ms."""
        # The second field is the program's name in parentheses and may hold spaces.
        after_name = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        user_ticks, system_ticks = int(after_name[11]), int(after_name[12])
        return (user_ticks + system_ticks) / _CLOCK_TICKS_PER_S

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _log_tail(self) -> str:
        self._log.seek(0)
        return "\n".join(self._log.read().splitlines()[-_LOG_TAIL_LINES:])
