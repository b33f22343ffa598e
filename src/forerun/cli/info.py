"""`forerun info`: what a model is and what one token of it costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.jsonlines import dumps
from forerun.cli.options import LoadOptions
from forerun.cli.progress import ProgressBar, resolve

if TYPE_CHECKING:
    from forerun.bench.fidelity import Fidelity
    from forerun.models.loader import LoadedModel

_KV_BYTES = {"f16": 2, "f32": 4}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What `forerun info` prints, in its order.

    Attributes:
        file: where the model lies.
        architecture: name of the forward pass.
        quantisation: the format most matrices have, as loaded.
        packing: how a folder's GPTQ, AWQ or compressed-tensors matrices are stored; None where there are none.
        parameters: weights; a tied head counts once.
        layers, hidden_size, heads, kv_heads, head_dim, vocabulary: sizes.
        context: positions the model was trained for.
        tensors_by_format: number of tensors of each format, as loaded.
        weight_bytes: all weights as loaded.
        bytes_per_token: weights that a decode pass reads, whether for one row or for eight.
        arithmetic_intensity: floating-point operations per such byte for one row. Each further row adds as many again
            and reads nothing more, which is what speculation lives on.
        kv_bytes_per_token: keys and values of one token in all layers.
    """

    file: str
    architecture: str
    quantisation: str
    packing: str | None
    parameters: int
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    tensors_by_format: dict[str, int]
    weight_bytes: int
    bytes_per_token: int
    arithmetic_intensity: float
    kv_bytes_per_token: int


def info(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A GGUF file, a Hugging Face folder or a name such as demo.")
    ],
    load: LoadOptions,
    fidelity: Annotated[
        bool, typer.Option("--fidelity", help="Compare with the float32 model over a packaged text.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a model is: sizes, formats, bytes and operations per token."""
    from forerun.models.loader import load_model

    path = resolve(model)
    described = describe(load_model(path, load.quant), load.kv)
    measured = _measure(path, load) if fidelity else None
    if json:
        print(dumps({**asdict(described), "fidelity": asdict(measured) if measured else None}))
    else:
        _print(described, measured)


def describe(model: LoadedModel, kv: str) -> ModelInfo:
    """The facts of a loaded model."""
    config = model.config
    # An embedding of its own is only looked up, a row per token; a tied one is the head and is read whole.
    looked_up = None if config.is_tied else next(model.weights.matrices())
    bytes_per_token = model.weight_bytes - (looked_up.data.nbytes if looked_up else 0)
    active = model.num_parameters - (looked_up.shape[0] * looked_up.shape[1] if looked_up else 0)
    return ModelInfo(
        file=str(model.path),
        architecture=config.architecture,
        quantisation=Counter(weight.format for weight in model.weights.matrices()).most_common(1)[0][0],
        packing=model.packing,
        parameters=model.num_parameters,
        layers=config.num_layers,
        hidden_size=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocabulary=config.vocab_size,
        context=config.context_length,
        tensors_by_format=dict(model.tensor_formats),
        weight_bytes=model.weight_bytes,
        bytes_per_token=bytes_per_token,
        arithmetic_intensity=2 * active / bytes_per_token,
        kv_bytes_per_token=2 * config.num_layers * config.num_kv_heads * config.head_dim * _KV_BYTES[kv],
    )


def _measure(path: Path, load: LoadOptions) -> Fidelity:
    from forerun.bench.fidelity import measure_fidelity

    with ProgressBar("comparing with float32") as bar:
        return measure_fidelity(path, load.quant, load.kv, load.threads, bar.update)


def _print(described: ModelInfo, measured: Fidelity | None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in asdict(described).items():
        if value is not None:
            table.add_row(name.replace("_", " "), _shown(name, value))
    if measured:
        table.add_row("KL to float32", f"{measured.kl:.5f} nats per token over {measured.num_tokens} tokens")
        table.add_row("top-1 agreement", f"{measured.top1_agreement:.2%}")
        table.add_row("perplexity", f"{measured.perplexity:.3f}, float32 {measured.reference_perplexity:.3f}")
    Console().print(table)


def _shown(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {fmt}" for fmt, count in value.items())
    if name == "arithmetic_intensity":
        return f"{value:.2f} operations per byte for one row"
    return f"{value:,}" if isinstance(value, int) else str(value)
