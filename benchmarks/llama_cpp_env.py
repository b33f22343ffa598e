"""The environment that llama.cpp runs in: made on first use, kept in the user's cache.

`FORERUN_PEERS_DIR` puts it elsewhere. Building takes about 8 minutes on two cores and needs a C++ compiler and CMake.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

VERSION = "0.3.36"
_BUILD_STEP = re.compile(r"\[(\d+)/(\d+)\]")

# GCC before 15 tells its optimiser that _tile_loadconfig reads 8 bytes of the 64 of a tile configuration. It then drops
# the stores of the rest, and llama.cpp's AMX code dies of a protection fault at its first pass (ggml-org/llama.cpp
# pull request 26954 describes the same). Without the right declaration the peer would have to run without AMX.
_AMX_HEADER = """\
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#include <immintrin.h>
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg\\t%X0" ::"m"(*(const char (*)[64])(config)))
#endif
"""


class InstallError(Exception):
    """The peer could not be installed."""


def peers_dir() -> Path:
    """Where peers and what is made for them live."""
    if chosen := os.environ.get("FORERUN_PEERS_DIR"):
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "forerun" / "peers"


def ensure_llama_cpp(console: Console) -> Path:
    """The interpreter of the peer's environment; makes the environment when there is none of this version.

    Raises:
        InstallError: the build failed; the message names its log.
    """
    home = peers_dir() / "llama_cpp"
    stamp = home / "installed"
    python = home / "bin" / "python"
    recipe = f"llama-cpp-python=={VERSION}\n{_AMX_HEADER}"
    if stamp.exists() and stamp.read_text() == recipe:
        return python
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    console.print(f"Installing llama-cpp-python {VERSION} into {home}; it is compiled here, about 8 minutes.")
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    header = home / "amx_tile_config.h"
    header.write_text(_AMX_HEADER)
    # Without pip's cache: it may hold a wheel that was built without the header.
    command = [str(python), "-m", "pip", "install", "-v", "--no-cache-dir", f"llama-cpp-python=={VERSION}"]
    env = {**os.environ, "CXXFLAGS": f'{os.environ.get("CXXFLAGS", "")} -include "{header}"'.strip()}
    _run_with_progress(command, env, home.with_name("llama_cpp-build.log"), console)
    stamp.write_text(recipe)
    return python


def _run_with_progress(command: list[str], env: dict[str, str], log_path: Path, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with (
        Progress(*columns, TimeElapsedColumn(), console=console) as progress,
        log_path.open("w", encoding="utf-8") as log,
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process,
    ):
        assert process.stdout is not None
        task = progress.add_task("llama.cpp", total=None)
        for line in process.stdout:
            log.write(line)
            if step := _BUILD_STEP.search(line):
                progress.update(task, completed=int(step[1]), total=int(step[2]))
    if process.returncode != 0:
        raise InstallError(f"installing llama-cpp-python {VERSION} failed; see {log_path}")
