"""The name of one build with one model."""

from __future__ import annotations

import hashlib
from pathlib import Path

from forerun import __version__

_SAMPLE_BYTES = 1 << 16


def fingerprint(path: Path, build: str) -> str:
    """What `system_fingerprint` says: the same for the same build and the same file, wherever the file lies.

    Args:
        path: a model file or folder. Of each file its size, beginning and end are looked at.
        build: what else the answers may depend on.
    """
    digest = hashlib.blake2b(f"{__version__}/{build}".encode(), digest_size=6)
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as content:
            digest.update(f"{'' if path.is_file() else file.name}/{size}/".encode())
            digest.update(content.read(_SAMPLE_BYTES))
            content.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(content.read(_SAMPLE_BYTES))
    return f"forerun-{__version__}-{digest.hexdigest()}"
