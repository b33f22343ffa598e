"""The environment that llama.cpp runs in. Building needs a C++ compiler and CMake, and 8 minutes on two cores."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.environment import ensure_environment, run_logged

VERSION = "0.3.36"
_BUILD_STEP = re.compile(r"\[(\d+)/(\d+)\]")

# GCC before 15 tells its optimiser that _tile_loadconfig reads 8 bytes of the 64 of a tile configuration. It then drops
# the stores of the rest, and llama.cpp's AMX code dies of a protection fault at its first pass (ggml-org/llama.cpp
# pull request 26954 describes the same). Without the right declaration the peer would have to run without AMX.
AMX_HEADER = """\
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#include <immintrin.h>
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg\\t%X0" ::"m"(*(const char (*)[64])(config)))
#endif
"""


def ensure_llama_cpp(console: Console) -> Path:
    """The interpreter of the peer's environment; makes the environment when there is none of this version.

    Raises:
        InstallError: the build failed; the message names its log.
    """

    def install(python: Path) -> None:
        home = python.parents[1]
        console.print(f"Installing llama-cpp-python {VERSION} into {home}; it is compiled here, about 8 minutes.")
        header = home / "amx_tile_config.h"
        header.write_text(AMX_HEADER)
        # Without pip's cache: it may hold a wheel that was built without the header.
        command = [str(python), "-m", "pip", "install", "-v", "--no-cache-dir", f"llama-cpp-python=={VERSION}"]
        env = {"CXXFLAGS": f'{os.environ.get("CXXFLAGS", "")} -include "{header}"'.strip()}
        log_path = home.with_name("llama_cpp-build.log")
        run_logged(command, f"installing llama-cpp-python {VERSION}", log_path, console, env=env, step=_BUILD_STEP)

    return ensure_environment("llama_cpp", f"llama-cpp-python=={VERSION}\n{AMX_HEADER}", install)


def versions(info: Mapping[str, Any]) -> dict[str, Any]:
    """For a report's provenance, from what llama.cpp says about itself."""
    return {"llama_cpp_python": info["version"], "llama_cpp_system_info": info["system_info"].strip(" |")}
