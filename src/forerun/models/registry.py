"""The architectures this version can run. One more is a model file and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.errors import LoadError
from forerun.models.config import read_architecture
from forerun.models.family import Family
from forerun.models.gemma3 import GEMMA3
from forerun.models.gguf import GgufFile
from forerun.models.llama import LLAMA
from forerun.models.olmo2 import OLMO2
from forerun.models.phi3 import PHI3
from forerun.models.qwen2 import QWEN2
from forerun.models.qwen3 import QWEN3

# By `general.architecture` of a GGUF file.
ARCHITECTURES: Mapping[str, Family] = {
    "gemma3": GEMMA3,
    "llama": LLAMA,
    "olmo2": OLMO2,
    "phi3": PHI3,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
}


def find_family(file: GgufFile) -> Family:
    """The entry a file's `general.architecture` names.

    Raises:
        LoadError: there is none; the message lists those there are.
    """
    name = read_architecture(file)
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise LoadError(f"{file.path}: architecture {name} is not supported; supported: {known}")
    return ARCHITECTURES[name]
