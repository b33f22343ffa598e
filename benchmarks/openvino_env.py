"""The environment that OpenVINO GenAI runs in, and the models exported to it.

Installing takes a minute beside the download, the export of a model of 135M parameters another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.environment import ensure_converted, ensure_environment, peers_dir, run_logged
from benchmarks.provenance import sha256_of

PACKAGES = (
    "openvino==2026.4.1",
    "openvino-genai==2026.4.1.0",
    # What exports: transformers reads the GGUF file, optimum-intel converts, nncf quantises.
    "openvino-tokenizers==2026.4.1.0",
    "optimum-intel==2.2.0",
    "nncf==3.4.0",
    "transformers==5.5.4",
    "torch==2.13.0",
    "gguf==0.19.0",
    "accelerate==1.15.0",
)
# optimum-intel asks for it and exports language models without. Beside a CPU build of torch the package index's build
# of it can't be imported, and then nothing of transformers can.
_UNWANTED = "torchvision"
# int4 with zero points in groups of 64, embedding and head int8: about the bits per weight of Q4_1.
EXPORT = {"bits": 4, "sym": False, "group_size": 64, "ratio": 1.0}


def ensure_openvino(console: Console) -> Path:
    """The interpreter of the peer's environment; makes the environment when there is none of these versions.

    Raises:
        InstallError: a package could not be installed; the message names the log.
    """

    def install(python: Path) -> None:
        home = python.parents[1]
        console.print(f"Installing OpenVINO GenAI and what exports models to it into {home}.")
        log_path = home.with_name("openvino-install.log")
        pip = [str(python), "-m", "pip"]
        run_logged([*pip, "install", *PACKAGES], "installing OpenVINO", log_path, console)
        removal_log = home.with_name("openvino-remove.log")
        run_logged([*pip, "uninstall", "-y", _UNWANTED], f"removing {_UNWANTED}", removal_log, console)

    return ensure_environment("openvino", "\n".join((*PACKAGES, f"without {_UNWANTED}")), install)


def ensure_exported(model_path: Path, python: Path, console: Console) -> Path:
    """The folder with the model in OpenVINO's format; exports it when there is none of this file by these versions.

    Args:
        model_path: a GGUF file of an architecture that transformers reads.
        python: of the peer's environment.
        console: shows the progress.

    Raises:
        InstallError: the export failed; the message names its log.
    """
    exporter = [str(python), "-m", "benchmarks.openvino_export", str(model_path)]
    return ensure_converted(
        peers_dir() / "models" / f"{model_path.stem}-openvino-int4",
        json.dumps({"source": sha256_of(model_path), "packages": PACKAGES, "export": EXPORT}),
        "exported.json",
        lambda unfinished: [*exporter, str(unfinished), json.dumps(EXPORT)],
        f"exporting {model_path.name} to OpenVINO",
        console,
    )


def versions(info: Mapping[str, Any]) -> dict[str, Any]:
    """For a report's provenance, from what OpenVINO says about itself; and how its model was made."""
    return {
        "openvino_genai": info["version"],
        "openvino": info["runtime"],
        "openvino_packages": list(PACKAGES),
        "openvino_weights": ", ".join(f"{name} {value}" for name, value in EXPORT.items()),
    }
