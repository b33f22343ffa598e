"""Where a number comes from: without this beside it, it can be neither trusted nor repeated."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from forerun import __version__
from forerun.machine import cpu_model

_ROOT = Path(__file__).resolve().parents[3]


def provenance(model_path: Path) -> dict[str, Any]:
    """What ran where on which file, as plain values for a report's JSON line."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["forerun", *sys.argv[1:]],
        "forerun": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "model": model_path.name,
        "model_bytes": model_path.stat().st_size,
    }


def _commit() -> str | None:
    """The checkout's commit, `+` behind it when files differ from it; None where this is no checkout."""
    if not (_ROOT / "src" / "forerun").is_dir():
        return None
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, check=True)
    return result.stdout.strip()
