"""What a GGUF file and a Hugging Face folder have in common once they are open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forerun.models.chat_template import ChatTemplate
from forerun.models.config import ModelConfig
from forerun.models.family import Family
from forerun.models.tokenizer import Tokenizer
from forerun.ops.base import Weight


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model whose tensors are known to be there and to have the right shapes.

    Attributes:
        family: what its architecture is.
        config: its sizes and constants.
        tensors: by the names that `decoder.tensor_shapes` gives them.
        read_tokenizer: makes the tokenizer; raises LoadError.
        read_chat_template: makes the chat template for that tokenizer, None for a model without; raises LoadError.
        packing: in words, how the quantised matrices of a folder are stored; None where there are none, and for a GGUF
            file, whose formats say it.
    """

    family: Family
    config: ModelConfig
    tensors: Mapping[str, Weight]
    read_tokenizer: Callable[[], Tokenizer]
    read_chat_template: Callable[[Tokenizer], ChatTemplate | None]
    packing: str | None
