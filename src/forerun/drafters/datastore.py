"""A model's datastore: texts that it wrote beforehand, for drafters to look in. It changes speed, never a token.

A text of nothing but the model's own habits tells a good part of what it writes next (He et al. 2023, REST, arXiv
2311.08252, drafts from a collection of texts in the same way). `forerun datastore` has a model write one; that of the
demo model comes with forerun. A datastore belongs to a model whatever its weights are stored as: all files of one shape
and one vocabulary share it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import ConfigError, LoadError
from forerun.models.config import ModelConfig
from forerun.models.store import cache_dir
from forerun.models.tokenizer import Tokenizer
from forerun.types import Int32Array

_SAMPLED_IDS = 64  # tokens whose texts tell vocabularies apart
_MAX_TOKENS = 1 << 24
# What numpy and zipfile raise for files that are not what they seem.
_BROKEN = (
    OSError, EOFError, KeyError, ValueError, TypeError, RuntimeError, SyntaxError, MemoryError, OverflowError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Datastore:
    """Texts of a model.

    Attributes:
        texts: each [N] int32, token ids.
        about: how they were made, as JSON values.
    """

    texts: tuple[Int32Array, ...]
    about: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        """Of all texts."""
        return sum(text.size for text in self.texts)


def datastore_name(config: ModelConfig, tokenizer: Tokenizer, *, is_chat: bool) -> str:
    """What a model's datastore is called: by its shape, its vocabulary and whether it has a chat template."""
    step = max(1, config.vocab_size // _SAMPLED_IDS)
    known = range(0, tokenizer.vocab_size, step)
    told = [config.intermediate_size, config.num_heads, config.num_kv_heads, config.vocab_size, is_chat]
    digest = hashlib.sha256(json.dumps([told, list(tokenizer.eos_ids)]).encode())
    for token_id in known:
        digest.update(tokenizer.token_bytes(token_id) + b"\0")
    return f"{config.architecture}-{config.num_layers}x{config.hidden_size}-{digest.hexdigest()[:12]}"


def own_path(name: str) -> Path:
    """Where the user's own datastore of this name belongs, whether it is there or not."""
    return cache_dir() / "datastores" / f"{name}.npz"


def find_datastore(name: str) -> Path | None:
    """The user's own datastore of this name, else the one that comes with forerun; None where there is neither."""
    shipped = Path(str(resources.files("forerun.drafters"))) / "datastores" / f"{name}.npz"
    return next((path for path in (own_path(name), shipped) if path.is_file()), None)


def read_datastore(path: Path, vocab_size: int) -> Datastore:
    """The texts of a file.

    Raises:
        LoadError: it can't be read, is damaged, or holds ids from vocab_size on.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            token_ids, lengths, about = arrays["token_ids"], arrays["lengths"], json.loads(str(arrays["about"]))
        return _checked(token_ids, lengths, about, vocab_size)
    except _BROKEN as error:
        raise LoadError(
            f"the datastore {path} can't be read ({error}); delete it, or write it anew with `forerun datastore`"
        ) from error


def _checked(token_ids: Any, lengths: Any, about: Any, vocab_size: int) -> Datastore:
    for array in (token_ids, lengths):
        if array.ndim != 1 or array.dtype not in (np.uint16, np.uint32):
            raise ValueError("its arrays are of another kind")
    if token_ids.size > _MAX_TOKENS or int(lengths.sum(dtype=np.uint64)) != token_ids.size:
        raise ValueError("its texts don't add up")
    if token_ids.size and int(token_ids.max()) >= vocab_size:
        raise ValueError(f"it holds token {int(token_ids.max())}, but the vocabulary has {vocab_size}")
    ends = np.cumsum(lengths, dtype=np.int64)
    return Datastore(tuple(np.split(token_ids.astype(np.int32), ends[:-1])), dict(about))


def check_writable(path: Path) -> None:
    """Finds out before the work is done whether its result can be kept.

    Raises:
        ConfigError: the file can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
    except OSError as error:
        raise ConfigError(f"the datastore {path} can't be written: {error}") from error


def write_datastore(path: Path, texts: Sequence[Sequence[int]], about: dict[str, Any]) -> None:
    """Writes a file whole or not at all.

    Raises:
        ConfigError: it can't be written.
    """
    ids = np.concatenate([np.array(text, np.uint32) for text in texts])
    if ids.max() < 1 << 16:
        ids = ids.astype(np.uint16)
    lengths = np.array([len(text) for text in texts], np.uint32)
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            np.savez_compressed(file, token_ids=ids, lengths=lengths, about=json.dumps(about))
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise ConfigError(f"the datastore {path} can't be written: {error}") from error
