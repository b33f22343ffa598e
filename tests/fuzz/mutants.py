"""A mutant is a function of a seed and a number: one of the bases, and one to four edits."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from tests.fuzz.bases import Base, Json, Part, Safetensors, Source, all_bases
from tests.fuzz.edits_gguf import GGUF_EDITS
from tests.fuzz.edits_json import edit_json, edit_safetensors, edit_source
from tests.fuzz.edits_raw import RAW_EDITS, move_file
from tests.fuzz.image import Image

_NUM_EDITS = [1, 1, 1, 1, 2, 2, 3, 4]
# What an edit works on, by the number of edits of that kind in a hundred.
_RAW_PERCENT, _FILE_PERCENT = 22, 4


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
    return [pickle.dumps(base) for base in all_bases()]  # the quickest deep copy


def unchanged() -> list[Mutant]:
    """Every base as it is."""
    return [
        Mutant(-1, base.name, {name: pack(part)[0] for name, part in base.parts.items()}, base.entry, ())
        for base in all_bases()
    ]


def make_mutant(seed: int, number: int) -> Mutant:
    """The same for the same arguments, on every machine."""
    rng = Random(f"{seed}/{number}")
    pickled = _pickled_bases()
    base: Base = pickle.loads(pickled[number % len(pickled)])
    kinds = rng.choices(
        ["structure", "raw", "file"],
        [100 - _RAW_PERCENT - _FILE_PERCENT, _RAW_PERCENT, _FILE_PERCENT],
        k=rng.choice(_NUM_EDITS),
    )
    edits = [_edit_structure(base, rng) for _ in range(kinds.count("structure"))]
    packed = {name: pack(part) for name, part in base.parts.items()}
    files = {name: data for name, (data, _) in packed.items()}
    for _ in range(kinds.count("raw")):
        name = _weighted_name(list(files), rng)
        raw = bytearray(files[name])
        edits.append(f"{name}: {rng.choice(RAW_EDITS)(raw, packed[name][1], rng)}")
        files[name] = bytes(raw)
    for _ in range(kinds.count("file")):
        if files:
            edits.append(move_file(files, rng))
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


def pack(part: Part) -> tuple[bytes, list[int]]:
    """A part as a file, and the places between its own parts."""
    if isinstance(part, Image):
        return part.pack()
    if isinstance(part, Json):
        return _json_bytes(part.tree), []
    if isinstance(part, Source):
        return part.text.encode("utf-8", "surrogatepass"), []
    header = _json_bytes(part.header)
    length = len(header) if part.stated_len is None else part.stated_len
    return (length % 2**64).to_bytes(8, "little") + header + part.data, [8, 8 + len(header)]


def _json_bytes(tree: object) -> bytes:
    return json.dumps(tree).encode()
