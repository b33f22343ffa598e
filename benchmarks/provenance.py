"""Where a benchmark's numbers come from: what forerun's own reports say, and what a comparison needs besides."""

from __future__ import annotations

import hashlib
import shlex
import sys
from pathlib import Path
from typing import Any

from forerun.bench.provenance import provenance as forerun_provenance

# Flags of the processor that decide which kernels run.
_KERNEL_FLAGS = (
    "avx2", "f16c", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_int8", "amx_bf16",
)  # fmt: skip


def collect(name: str, model_path: Path, num_threads: int, cpus: list[int], peer: dict[str, Any]) -> dict[str, Any]:
    """Plain values for the report of the benchmark `name`.

    Args:
        name: as `scripts/bench` takes it.
        model_path: the file that was measured.
        num_threads: threads of every arm.
        cpus: the CPUs that all arms were pinned to.
        peer: which peers these were, by their `versions`.
    """
    return {
        **forerun_provenance(model_path),
        "command": shlex.join(["scripts/bench", name, *sys.argv[1:]]),
        "cpu_flags": kernel_flags(Path("/proc/cpuinfo").read_text()),
        "threads": num_threads,
        "pinned_to": cpus,
        "model_sha256": sha256_of(model_path),
        **peer,
    }


def kernel_flags(cpuinfo: str) -> list[str]:
    """The flags in the text of /proc/cpuinfo that decide which kernels run."""
    line = next((line for line in cpuinfo.splitlines() if line.startswith("flags")), "")
    present = set(line.partition(":")[2].split())
    return [flag for flag in _KERNEL_FLAGS if flag in present]


def sha256_of(path: Path) -> str:
    """Of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
