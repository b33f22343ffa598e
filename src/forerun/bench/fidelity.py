"""How far the served model is from its float32 form, over a text that ships with the package.

Exactness is with respect to the model as served; this is the other number, what quantisation itself has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from forerun.bench.rows import bind, run_batch
from forerun.models.loader import LoadedModel, load_model
from forerun.ops.base import Executor, KvType
from forerun.types import Float32Array, Float64Array

MAX_TOKENS = 512
_ROWS = 32  # per pass: bounds the logits that are held at once to 32 x V of each model


@dataclass(frozen=True, slots=True)
class Fidelity:
    """The served model p' beside the float32 model p, on every position of a text.

    Attributes:
        num_tokens: positions compared.
        kl: mean of KL(p || p') in nats.
        top1_agreement: share of positions where both like the same token best.
        perplexity: of the text's own tokens under p'.
        reference_perplexity: the same under p.
    """

    num_tokens: int
    kl: float
    top1_agreement: float
    perplexity: float
    reference_perplexity: float


def measure_fidelity(
    path: Path,
    quant: str,
    kv_type: KvType,
    num_threads: int | None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Fidelity:
    """Runs the packaged text through the model as served and, native too, through its float32 form with float32 KV.

    Args:
        path: the GGUF file or Hugging Face folder.
        quant, kv_type, num_threads: as served.
        on_progress: called with the tokens done and their total.

    Raises:
        LoadError: the file can't be served.
    """
    served, reference = load_model(path, quant), load_model(path, "f32")
    token_ids = text_token_ids(served)
    return compare(
        bind(served, len(token_ids), _ROWS, kv_type, num_threads),
        bind(reference, len(token_ids), _ROWS, "f32", num_threads),
        token_ids,
        on_progress,
    )


def packaged_text() -> str:
    """The text that ships with the package."""
    return resources.files("forerun.bench").joinpath("text.txt").read_text(encoding="utf-8")


def text_token_ids(model: LoadedModel, max_tokens: int = MAX_TOKENS) -> list[int]:
    """The packaged text in the model's tokens, cut to max_tokens and to the model's context."""
    token_ids = model.read_tokenizer().encode(packaged_text())
    return token_ids[: min(max_tokens, model.config.context_length)]


def compare(
    served: Executor,
    reference: Executor,
    token_ids: list[int],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Fidelity:
    """Feeds both executors the same tokens from an empty cache and compares every row of logits but the last."""
    tokens = np.array(token_ids, np.int32)
    kl, agree, nll, reference_nll = [], [], [], []
    for start in range(0, len(tokens), _ROWS):
        chunk = tokens[start : start + _ROWS]
        batch = run_batch(chunk, start, len(chunk), len(tokens))
        # The row of the text's last token predicts nothing that is known.
        targets = tokens[start + 1 : start + 1 + len(chunk)]
        logits, reference_logits = (executor.forward(batch).logits[: len(targets)] for executor in (served, reference))
        log_q, log_p = _log_softmax(logits), _log_softmax(reference_logits)
        kl.append((np.exp(log_p) * (log_p - log_q)).sum(axis=1))
        agree.append(logits.argmax(axis=1) == reference_logits.argmax(axis=1))
        rows = np.arange(len(targets))
        nll.append(-log_q[rows, targets])
        reference_nll.append(-log_p[rows, targets])
        on_progress(min(start + _ROWS, len(tokens)), len(tokens))
    return Fidelity(
        num_tokens=len(tokens) - 1,
        kl=float(np.concatenate(kl).mean()),
        top1_agreement=float(np.concatenate(agree).mean()),
        perplexity=float(np.exp(np.concatenate(nll).mean())),
        reference_perplexity=float(np.exp(np.concatenate(reference_nll).mean())),
    )


def _log_softmax(logits: Float32Array) -> Float64Array:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide
