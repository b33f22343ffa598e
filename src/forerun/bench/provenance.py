"""Where a number comes from: without this beside it, it can be neither trusted nor repeated."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np

from forerun import __version__
from forerun.machine import cpu_model


def provenance(model_path: Path | None) -> dict[str, Any]:
    """What ran where on which file, as plain values for a report's JSON line; None where only a server has it."""
    model = {"model": model_path.name, "model_bytes": model_path.stat().st_size} if model_path else {}
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
        **model,
    }


def _commit() -> str | None:
    """The checkout's commit, `+` behind it when files differ from it; None where this is no checkout."""
    root = _checkout(Path(__file__).resolve().parents[1])
    if root is None:
        return None
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(root, "status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _checkout(package: Path) -> Path | None:
    """The checkout that a package lies in, or was installed from and is still the same as."""
    if package.parent.name == "src":
        return package.parents[1]
    try:
        installed_from = json.loads(distribution("forerun").read_text("direct_url.json") or "{}")
        source = Path(url2pathname(urlsplit(installed_from["url"]).path)) / "src" / "forerun"
        names = sorted(path.relative_to(package) for path in package.rglob("*.py"))
        same = bool(names) and all((package / name).read_bytes() == (source / name).read_bytes() for name in names)
    except (OSError, PackageNotFoundError, ValueError, LookupError, TypeError):
        return None
    return source.parents[1] if same else None


def _git(root: Path, *arguments: str) -> str:
    result = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return result.stdout.strip()
