"""From a path to a model that is ready to be bound to a backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

from forerun.errors import ConfigError, LoadError
from forerun.models.chat_template import ChatTemplate
from forerun.models.config import ModelConfig
from forerun.models.decoder import DecoderWeights, build_weights, forward, tensor_shapes
from forerun.models.family import read_config
from forerun.models.gguf import read_gguf
from forerun.models.hf_folder import open_folder
from forerun.models.opened import OpenModel
from forerun.models.registry import find_family
from forerun.models.tokenizer import Tokenizer
from forerun.models.weights import WeightSource, require_effect, require_tensors
from forerun.ops.base import AttentionSpec, Ops, Quant, T

AUTO_QUANT = "auto"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on the host, not yet bound to a backend. Set by `load_model`.

    Attributes:
        path: the file or folder it came from.
        config: its sizes and constants.
        weights: its weights, views of the mapped files where the format was kept.
        read_tokenizer: makes the model's tokenizer; raises LoadError.
        read_chat_template: makes its chat template for that tokenizer, None if it has none; raises LoadError.
        packing: in words, how a folder's quantised matrices are stored; None where there are none.
        tensor_formats: how many of the loaded tensors have each format, most frequent first.
        num_parameters: weights of all tensors; a tied head counts once.
        weight_bytes: bytes of all tensors as loaded; a tied head counts once.
    """

    path: Path
    config: ModelConfig
    weights: DecoderWeights
    read_tokenizer: Callable[[], Tokenizer]
    read_chat_template: Callable[[Tokenizer], ChatTemplate | None]
    packing: str | None
    tensor_formats: Mapping[str, int]
    num_parameters: int
    weight_bytes: int

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """Heads, RoPE and window of each layer, which a backend must know to reserve KV storage."""
        return self.config.attentions

    def forward(self, ops: Ops[T]) -> T:
        """One pass of the model written in ops: raw logits [R, V]."""
        return forward(ops, self.weights, self.config)


def load_model(
    path: Path, quant: str = AUTO_QUANT, max_len: int | None = None, *, must_apply: bool = True
) -> LoadedModel:
    """Loads a GGUF file or a Hugging Face folder.

    Args:
        path: the file or the folder.
        quant: `auto` keeps every matrix as it is stored, `f32` expands all, `bf16`, `q8` or `q4` converts floats,
            and what is quantised where that makes it smaller (q4 keeps the embedding and the LM head at 8 bits).
        max_len: the longest text the model will run on, which decides between the frequencies of LongRoPE; None is
            its whole context.
        must_apply: whether a quant that would change nothing is an error.

    Raises:
        ConfigError: quant is none of these, or would change nothing although it must.
        LoadError: a file can't be read, or holds something that is not supported.
    """
    choice = parse_quant(quant)
    model = open_folder(path, max_len) if path.is_dir() else _open_gguf(path, max_len)
    if must_apply:
        require_effect(path, model.tensors, choice)
    with named(path):
        weights = build_weights(WeightSource(model.tensors, choice), model.family, model.config)
    matrices, vectors = list(weights.matrices()), list(weights.vectors())
    formats = Counter([weight.format for weight in matrices] + ["f32"] * len(vectors))
    return LoadedModel(
        path=path,
        config=model.config,
        weights=weights,
        read_tokenizer=model.read_tokenizer,
        read_chat_template=model.read_chat_template,
        packing=model.packing,
        tensor_formats=dict(formats.most_common()),
        num_parameters=sum(weight.shape[0] * weight.shape[1] for weight in matrices)
        + sum(vector.size for vector in vectors),
        weight_bytes=sum(weight.data.nbytes for weight in matrices) + sum(vector.nbytes for vector in vectors),
    )


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Puts the model's path before what is wrong with a part of it, unless it is named already."""
    try:
        yield
    except LoadError as error:
        if str(path) in str(error):
            raise
        raise LoadError(f"{path}: {error}") from error


def _open_gguf(path: Path, max_len: int | None) -> OpenModel:
    file = read_gguf(path)
    family = find_family(file)
    config = read_config(file, family, max_len)
    require_tensors(file, tensor_shapes(family, config, file.tensors.keys()))
    return OpenModel(
        family=family,
        config=config,
        tensors=file.tensors,
        read_tokenizer=partial(Tokenizer.from_gguf, file.metadata),
        read_chat_template=partial(ChatTemplate.from_gguf, file.metadata),
        packing=None,
    )


def parse_quant(quant: str) -> Quant | None:
    """The backend's word for a user's choice; None is `auto`."""
    if quant == AUTO_QUANT:
        return None
    for known in get_args(Quant):
        if quant == known:
            return known  # type: ignore[no-any-return]
    raise ConfigError(f"quant is {quant!r}, but must be one of {AUTO_QUANT}, {', '.join(get_args(Quant))}")
