"""A model bound to a backend: what a target and a draft model have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.kv.pages import num_pages_for
from forerun.models.chat_template import ChatTemplate
from forerun.models.config import ModelConfig
from forerun.models.decoder import DecoderWeights, forward
from forerun.models.loader import LoadedModel, load_model, named
from forerun.models.pull import resolve_model
from forerun.models.tokenizer import Tokenizer
from forerun.ops import ExecutorConfig, create_executor
from forerun.ops.base import Executor, KvType


@dataclass(frozen=True, slots=True)
class BindSettings:
    """How a model is loaded and bound.

    Attributes:
        backend: `native` or `torch`.
        device: `cpu`, or for the torch backend `cuda` or `cuda:N`.
        quant: as for `loader.load_model`.
        kv: how keys and values are stored.
        threads: threads to compute with; None leaves it to the backend.
        max_rows: the most rows of one pass.
        kv_tokens: tokens that the KV cache holds, of all sequences together; never fewer than one may have.
    """

    backend: str
    device: str
    quant: str
    kv: KvType
    threads: int | None
    max_rows: int
    kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BoundModel:
    """A model that can run.

    Attributes:
        path: its file or folder.
        config: its sizes and constants.
        tokenizer: text to ids and back.
        chat_template: None for a model without.
        executor: runs passes.
        max_len: tokens of one sequence at most.
        num_pages: of its KV storage.
        weights: what the executor has bound, without the data of the matrices.
    """

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    executor: Executor
    max_len: int
    num_pages: int
    weights: DecoderWeights

    def with_layers(self, layers: Sequence[int]) -> Executor:
        """The model with only some of its layers, then its final norm and LM head, over the same weights and cache.

        Args:
            layers: numbers from 0, ascending; at least one.
        """
        return self.executor.variant(lambda ops: forward(ops, self.weights, self.config, layers))


def open_model(
    model: str | Path,
    settings: BindSettings,
    max_len: int | None,
    progress: Callable[[int, int], None] | None = None,
    *,
    must_apply: bool = True,
) -> LoadedModel:
    """Finds and loads a model that `bind_model` then binds; the mapped file is held until then.

    Args as for `loader.load_model`.
    """
    return load_model(resolve_model(model, progress), settings.quant, max_len, must_apply=must_apply)


def bind_model(loaded: LoadedModel, settings: BindSettings, max_len: int) -> BoundModel:
    """Binds a loaded model to a backend, for sequences of max_len tokens.

    Raises:
        ConfigError: a setting is out of range, or the backend is not available.
        LoadError: the tokenizer, the template or a weight can't be used; names the file.
    """
    with named(loaded.path):
        tokenizer = loaded.read_tokenizer()
        chat_template = loaded.read_chat_template(tokenizer)
    config = loaded.config
    num_pages = num_pages_for(max(max_len, settings.kv_tokens))
    executor_config = ExecutorConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        attentions=loaded.attentions,
        max_rows=settings.max_rows,
        num_pages=num_pages,
        kv_type=settings.kv,
        num_threads=settings.threads,
        max_len=max_len,
        device=settings.device,
    )
    with named(loaded.path):
        executor = create_executor(settings.backend, executor_config, loaded.forward)
    weights = loaded.weights.without_data()
    return BoundModel(loaded.path, config, tokenizer, chat_template, executor, max_len, num_pages, weights)
