"""Environments of other engines: made on first use, kept in the user's cache, or where `FORERUN_PEERS_DIR` says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.wire import ROOT


class InstallError(Exception):
    """A peer, or what is made for it, could not be installed."""


def peers_dir() -> Path:
    """Where peers and what is made for them live."""
    if chosen := os.environ.get("FORERUN_PEERS_DIR"):
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "forerun" / "peers"


def ensure_environment(name: str, recipe: str, install: Callable[[Path], None]) -> Path:
    """The interpreter of a virtual environment that was made by this recipe; makes it when there is none.

    Args:
        name: of the folder in `peers_dir`.
        recipe: says what is installed and how; another one makes the environment anew.
        install: given the interpreter of an empty environment, installs into it.

    Raises:
        InstallError: `install` says so.
    """
    home = peers_dir() / name
    stamp = home / "installed"
    python = home / "bin" / "python"
    if stamp.exists() and stamp.read_text() == recipe:
        return python
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    install(python)
    stamp.write_text(recipe)
    return python


def ensure_converted(
    folder: Path,
    recipe: str,
    stamp_name: str,
    command: Callable[[Path], list[str]],
    what: str,
    console: Console,
    needs: Sequence[str] = (),
) -> Path:
    """A folder that a command has made by this recipe; makes it when there is none.

    Args:
        folder: where it is.
        recipe: says of what and how it is made; another one makes it anew.
        stamp_name: of the file in it that holds the recipe.
        command: given an empty folder, fills it.
        what: happens, in words.
        console: shows the progress.
        needs: files that must have been made.

    Raises:
        InstallError: the command failed, or made less; the message names its log.
    """
    stamp = folder / stamp_name
    if stamp.exists() and stamp.read_text() == recipe:
        return folder
    unfinished = folder.with_name(folder.name + ".part")
    for old in (folder, unfinished):
        shutil.rmtree(old, ignore_errors=True)
    unfinished.mkdir(parents=True)
    # The model's file is at hand; nothing is to be looked up anywhere.
    log_path = folder.with_name(folder.name + ".log")
    run_logged(command(unfinished), what, log_path, console, env={"HF_HUB_OFFLINE": "1"})
    missing = next((name for name in needs if not (unfinished / name).exists()), None)
    if missing is not None:
        raise InstallError(f"{what} left no {missing}; see {log_path}")
    (unfinished / stamp.name).write_text(recipe)
    unfinished.rename(folder)
    return folder


def run_logged(
    command: list[str],
    what: str,
    log_path: Path,
    console: Console,
    *,
    env: Mapping[str, str] | None = None,
    step: re.Pattern[str] | None = None,
) -> None:
    """Runs a long command from the checkout's root; its output goes to a file, its progress to the console.

    Args:
        command: what runs.
        what: what it does, in words.
        log_path: gets standard output and standard error; the folder exists.
        console: shows the progress.
        env: variables beside this process's own.
        step: finds the steps done and the steps in all in a line of output.

    Raises:
        InstallError: the command failed; the message names its log.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with (
        Progress(*columns[: 3 if step else 2], TimeElapsedColumn(), console=console) as progress,
        log_path.open("w", encoding="utf-8") as log,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        task = progress.add_task(what, total=None)
        for line in process.stdout:
            log.write(line)
            if step and (found := step.search(line)):
                progress.update(task, completed=int(found[1]), total=int(found[2]))
    if process.returncode != 0:
        raise InstallError(f"{what} failed; see {log_path}")
