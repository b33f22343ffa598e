"""llama.cpp's own server, built from the sources that llama-cpp-python ships; minutes on two cores.

It needs a C++ compiler and CMake. Its web page is left out: it would have to be fetched from elsewhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from rich.console import Console

from benchmarks.environment import peers_dir, run_logged
from benchmarks.llama_cpp_env import AMX_HEADER, VERSION

OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}
_JOBS = 2


def ensure_llama_server(console: Console) -> Path:
    """The program; builds it when there is none of this version by this recipe.

    Raises:
        InstallError: a download or the build failed; the message names its log.
    """
    home = peers_dir() / "llama_server"
    stamp, program = home / "installed", home / "build" / "bin" / "llama-server"
    recipe = f"llama-cpp-python=={VERSION}\n{OPTIONS}\n{AMX_HEADER}"
    if stamp.exists() and stamp.read_text() == recipe:
        return program
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    console.print(f"Building llama-server of llama-cpp-python {VERSION} in {home}; about 10 minutes on two cores.")
    source = _fetch_source(home, console)
    header = home / "amx_tile_config.h"
    header.write_text(AMX_HEADER)
    flags = f'{os.environ.get("CXXFLAGS", "")} -include "{header}"'.strip()
    configure = ["cmake", "-S", str(source), "-B", str(home / "build"), *(f"-D{k}={v}" for k, v in OPTIONS.items())]
    build = ["cmake", "--build", str(home / "build"), "--target", "llama-server", "-j", str(_JOBS)]
    run_logged(configure, "configuring llama-server", home / "configure.log", console, env={"CXXFLAGS": flags})
    run_logged(build, "building llama-server", home / "build.log", console)
    stamp.write_text(recipe)
    return program


def _fetch_source(home: Path, console: Console) -> Path:
    """llama.cpp's tree out of the source distribution."""
    download = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "-d", str(home),
        f"llama-cpp-python=={VERSION}",
    ]  # fmt: skip
    run_logged(download, f"fetching llama-cpp-python {VERSION}", home / "download.log", console)
    with tarfile.open(next(home.glob("llama_cpp_python-*.tar.gz"))) as archive:
        archive.extractall(home, filter="data")
    return next(home.glob("llama_cpp_python-*/vendor/llama.cpp"))


def version_line(program: Path) -> str:
    """What the program says of its version."""
    result = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=True)
    return next(line for line in (result.stdout + result.stderr).splitlines() if line.startswith("version"))
