"""Runs many mutants in processes of their own, and watches these for time, memory and crashes."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

# What one mutant, of half a megabyte at most, may cost; with sanitizers everything takes a few times longer.
MAX_CPU_S = 10.0
MAX_PEAK_MB = 400.0
_COMMAND = (sys.executable, "-m", "tests.fuzz.worker")
# Where a process is ended from outside.
KILL_S, KILL_MB = 60.0, 2500.0
START_S = 120.0  # more, for the first answer


@dataclass(frozen=True)
class Outcome:
    """How one mutant ended: `works`, `refused` or `fault`; of a fault, what it was."""

    number: int
    how: str
    fault: str = ""
    cpu_s: float = 0.0
    peak_mb: float = 0.0


@dataclass
class Tally:
    """Of many outcomes."""

    counts: dict[str, int] = field(default_factory=lambda: {"works": 0, "refused": 0, "fault": 0})
    faults: list[Outcome] = field(default_factory=list)
    slowest: Outcome = Outcome(-1, "")
    largest: Outcome = Outcome(-1, "")
    cpu_s: float = 0.0

    def add(self, outcome: Outcome) -> None:
        self.counts[outcome.how] += 1
        self.cpu_s += outcome.cpu_s
        self.slowest = max(self.slowest, outcome, key=lambda each: each.cpu_s)
        self.largest = max(self.largest, outcome, key=lambda each: each.peak_mb)
        if outcome.how == "fault":
            self.faults.append(outcome)

    def __str__(self) -> str:
        return (
            f"{sum(self.counts.values())} mutants: {self.counts['works']} work, {self.counts['refused']} are refused, "
            f"{self.counts['fault']} end in a fault; {self.cpu_s:.0f} s of CPU, slowest "
            f"{self.slowest.cpu_s:.1f} s ({self.slowest.number}), most memory {self.largest.peak_mb:.0f} MB "
            f"({self.largest.number})"
        )


def run_fleet(
    seed: int, numbers: Iterable[int], num_jobs: int, native: str = "", *, max_faults: int = 20
) -> Iterator[Outcome]:
    """Runs mutants in so many processes; yields outcomes as they come and ends after max_faults faults."""
    queue, lock = iter(numbers), threading.Lock()
    done: list[Outcome] = []
    arrived = threading.Condition(lock)
    is_stopped = threading.Event()

    def work() -> None:
        with Worker([*_COMMAND, str(seed), native], worker_environment(native)) as worker:
            while not is_stopped.is_set():
                with lock:
                    number = next(queue, None)
                if number is None:
                    return
                outcome = worker.run(number)
                with arrived:
                    done.append(outcome)
                    arrived.notify()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(num_jobs)]
    for thread in threads:
        thread.start()
    num_faults = 0
    while num_faults < max_faults:
        with arrived:
            while not done and any(thread.is_alive() for thread in threads):
                arrived.wait(0.2)
            outcomes, done[:] = list(done), []
        if not outcomes:
            break
        num_faults += sum(outcome.how == "fault" for outcome in outcomes)
        yield from outcomes
    is_stopped.set()
    for thread in threads:
        thread.join()


class Worker:
    """A process that runs one mutant at a time, started again after it has died.

    Args:
        command: reads numbers, a line each, and answers each with a line of JSON (`worker`).
        environment: of the process.
        kill_s: how long it may take for an answer.
        kill_mb: how much memory it may use.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], kill_s: float = KILL_S, kill_mb: float = KILL_MB
    ) -> None:
        self._command = command
        self._environment = environment
        self._kill_s = kill_s
        self._kill_mb = kill_mb
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._log.close()

    def run(self, number: int) -> Outcome:
        """Runs a mutant; whatever ends the process is a fault."""
        patience_s = self._kill_s
        if self._process is None:
            self._start()
            patience_s += START_S
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(b"%d\n" % number)
            process.stdin.flush()
            answer, why = self._wait(process, patience_s)
        except BrokenPipeError:
            answer, why = b"", "ended"
        if not answer.endswith(b"\n"):
            self._stop()
            return Outcome(number, "fault", f"the process {why}: {self._last_words()}")
        fields = json.loads(answer)
        outcome = Outcome(number, **fields)
        if outcome.how != "fault" and (outcome.cpu_s > MAX_CPU_S or outcome.peak_mb > MAX_PEAK_MB):
            return Outcome(
                number, "fault", f"it took {outcome.cpu_s:.1f} s of CPU and {outcome.peak_mb:.0f} MB",
                outcome.cpu_s, outcome.peak_mb,
            )  # fmt: skip
        return outcome

    def _wait(self, process: subprocess.Popen[bytes], patience_s: float) -> tuple[bytes, str]:
        """(the answer, or nothing; what became of the process)."""
        assert process.stdout is not None
        deadline_s = time.monotonic() + patience_s
        while time.monotonic() < deadline_s:
            if select.select([process.stdout], [], [], 0.1)[0]:
                return process.stdout.readline(), "ended"
            if _rss_mb(process.pid) > self._kill_mb:
                return b"", f"used more than {self._kill_mb:.0f} MB"
        return b"", f"took longer than {patience_s:.0f} s"

    def _start(self) -> None:
        self._log.seek(0)
        self._log.truncate()
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=self._environment
        )

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _last_words(self) -> str:
        """What a sanitizer or Python wrote before the end."""
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").splitlines()
        starts = [
            i for i, line in enumerate(lines) if "ERROR: " in line or "runtime error" in line or "panicked" in line
        ]
        return "\n".join(lines[starts[-1] :][:40] if starts else lines[-20:])


def worker_environment(native: str) -> Mapping[str, str]:
    """The environment of a worker; sanitizers that the module is linked with must be there before Python is."""
    environment = dict(os.environ, PYTHONMALLOC="malloc", RUST_BACKTRACE="0", TOKENIZERS_PARALLELISM="false")
    if not native:
        return environment
    linked = subprocess.run(["ldd", native], check=True, capture_output=True, text=True).stdout
    paths = [
        line.split()[2] for line in linked.splitlines() if any(f"lib{n}." in line for n in ("asan", "ubsan", "stdc++"))
    ]
    options = "detect_leaks=0:quarantine_size_mb=16:max_allocation_size_mb=1024:allocator_may_return_null=0"
    return environment | {
        "LD_PRELOAD": " ".join(paths),
        "ASAN_OPTIONS": options,
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }


def _rss_mb(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (OSError, IndexError):
        return 0.0
