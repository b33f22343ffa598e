"""A mutant is a function of a seed and a number: one of the bases, and one to four edits."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from tests.fuzz.bases_folder import folder_bases
from tests.fuzz.bases_gguf import gguf_bases
from tests.fuzz.edits_gguf import GGUF_EDITS
from tests.fuzz.edits_json import edit_json, edit_safetensors, edit_source
from tests.fuzz.edits_raw import RAW_EDITS, TEXT_EDITS, move_file
from tests.fuzz.image import Image
from tests.fuzz.parts import Base, Json, Part, Safetensors, pack

_NUM_EDITS = [1, 1, 1, 1, 2, 2, 3, 4]
# What an edit works on, and how many of a hundred do.
_PERCENT = {"structure": 74, "raw": 22, "file": 4}


@dataclass(frozen=True)
class Mutant:
    """Files by name, the one to open ("" is the folder), and what was done to them."""

    number: int
    base: str
    files: dict[str, bytes]
    entry: str
    edits: tuple[str, ...]

    def write(self, folder: Path) -> None:
        """Writes the files, whose names have no folder in them."""
        for name, data in self.files.items():
            (folder / name).write_bytes(data)

    def __str__(self) -> str:
        return f"mutant {self.number} of {self.base}: " + "; ".join(self.edits)


@cache
def _pickled_bases() -> list[bytes]:
    return [pickle.dumps(base) for base in (*gguf_bases(), *folder_bases())]  # the quickest deep copy


def unchanged() -> list[Mutant]:
    """Every base as it is."""
    bases: list[Base] = [pickle.loads(pickled) for pickled in _pickled_bases()]
    return [
        Mutant(number, base.name, {name: pack(part)[0] for name, part in base.parts.items()}, base.entry, ())
        for number, base in enumerate(bases)
    ]


def make_mutant(seed: int, number: int) -> Mutant:
    """The same for the same arguments, on every machine."""
    rng = Random(f"{seed}/{number}")
    pickled = _pickled_bases()
    base: Base = pickle.loads(pickled[number % len(pickled)])
    kinds = rng.choices(list(_PERCENT), list(_PERCENT.values()), k=rng.choice(_NUM_EDITS))
    edits = [_edit_structure(base, rng) for _ in range(kinds.count("structure"))]
    packed = {name: pack(part) for name, part in base.parts.items()}
    files = {name: data for name, (data, _) in packed.items()}
    for _ in range(kinds.count("raw")):
        name = _weighted_name(list(files), rng)
        raw = bytearray(files[name])
        edit = rng.choice(TEXT_EDITS if name.endswith((".json", ".jinja")) else RAW_EDITS)
        edits.append(f"{name}: {edit(raw, packed[name][1], rng)}")
        files[name] = bytes(raw)
    edits += [move_file(files, rng) for _ in range(kinds.count("file"))]
    return Mutant(number, base.name, files, base.entry, tuple(edits))


def _edit_structure(base: Base, rng: Random) -> str:
    for _ in range(20):
        name = _weighted_name(list(base.parts), rng)
        done = _edit_part(name, base.parts[name], rng)
        if done is not None:
            return f"{name}: {done}"
    return "nothing"


def _edit_part(name: str, part: Part, rng: Random) -> str | None:
    if isinstance(part, Image):
        return rng.choice(GGUF_EDITS)(part, rng)
    if isinstance(part, Json):
        return edit_json(name, part, rng)
    return edit_safetensors(part, rng) if isinstance(part, Safetensors) else edit_source(part, rng)


def _weighted_name(names: list[str], rng: Random) -> str:
    """Tokenizers and configs have more in them than the rest."""
    weights = {"tokenizer.json": 6, "config.json": 4, "tokenizer_config.json": 2}
    return rng.choices(names, [weights.get(name, 1) for name in names])[0]
