"""Runs mutants whose numbers it reads from its input; answers each with one line of JSON. See `fleet`."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path


def load_native(path: str) -> None:
    """Puts another build of the compiled module in the place of the installed one; before anything imports that."""
    spec = importlib.util.spec_from_file_location("forerun._native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)


class _PeakMemory:
    """The most memory this process has used since `reset`, where the kernel counts it (Linux)."""

    def reset(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._start = self._read("VmRSS")

    def grown_mb(self) -> float:
        return (self._read("VmHWM") - self._start) / 1024

    def _read(self, key: str) -> int:
        status = Path("/proc/self/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith(f"{key}:")))


def main(seed: int, native: str) -> None:
    """Answers until its input ends."""
    if native:
        load_native(native)
    from tests.fuzz.mutants import make_mutant
    from tests.fuzz.use import Fault, use_model

    warnings.simplefilter("error")  # a warning is a thing that nobody thought of
    answers, memory = sys.stdout, _PeakMemory()
    sys.stdout = sys.stderr  # whatever else prints
    for line in sys.stdin:
        number = int(line)
        mutant = make_mutant(seed, number)
        with tempfile.TemporaryDirectory(prefix="forerun-fuzz-") as name:
            folder = Path(name)
            mutant.write(folder)
            memory.reset()
            start_s = time.process_time()
            try:
                how = use_model(folder, mutant.entry, number).how
                fault = ""
            except Fault as error:
                how, fault = "fault", str(error)
            answer = {"how": how, "fault": fault, "cpu_s": time.process_time() - start_s, "peak_mb": memory.grown_mb()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
