from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from tests.helpers.conformance import FetchError, Package, conformance_dir, conformance_file, fetch, main

FILES = {"p/models/a.gguf": b"one", "p/models/b.txt": b"no", "p/models/x/c.jinja": b"two", "p/d.gguf": b"no"}


def archive() -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w:gz") as tar:
        for name, content in FILES.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return sink.getvalue()


ARCHIVE = archive()
TARGETS = {"p/models": "", "p/models/x": "templates"}


def package(sha256: str = hashlib.sha256(ARCHIVE).hexdigest(), targets: dict[str, str] = TARGETS) -> Package:
    def put(_: Package, folder: Path) -> None:
        (folder / "p-1.tar.gz").write_bytes(ARCHIVE)

    return Package("p", "1", sha256, targets, (".gguf", ".jinja"), put)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_CONFORMANCE_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_wanted_files_are_unpacked_once(folder: Path) -> None:
    assert conformance_dir() == folder
    assert fetch(package())
    assert names(folder) == {"a.gguf", "templates/c.jinja", "p-1.complete"}
    assert conformance_file("templates/c.jinja").read_bytes() == b"two"
    assert not fetch(package())


@pytest.mark.parametrize(
    ("bad", "words"),
    [(package("0" * 64), "has sha256 .* instead of 000"), (package(targets={"q": ""}), "no files in q")],
)
def test_another_package_leaves_nothing_behind(folder: Path, bad: Package, words: str) -> None:
    with pytest.raises(FetchError, match=words):
        fetch(bad)
    assert names(folder) == set()


def test_without_the_package_a_test_is_skipped_with_a_way_out(folder: Path) -> None:
    with pytest.raises(pytest.skip.Exception, match=r"a\.gguf is not there; fetch it with: python -m tests"):
        conformance_file("a.gguf")


def test_what_can_not_be_fetched_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: object) -> None:
        raise FetchError("no network")

    monkeypatch.setattr("tests.helpers.conformance._run", refuse)
    monkeypatch.setattr("shutil.which", lambda name: name)
    assert main() == 1
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "conformance: llama-cpp-python can't be fetched: no network"
    assert len(told) == 6
