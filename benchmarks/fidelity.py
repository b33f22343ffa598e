"""`scripts/bench fidelity`: how far forerun and llama.cpp are from the float32 model on the same file and text.

The reference is the torch backend in float32, with float32 keys and values, on the file's dequantised weights. All see
the same windows of tokens, each from an empty cache, and every position's logits are compared: KL(reference || served)
in nats and how often both like the same token best. What differs between the engines is therefore their arithmetic
alone: quantised activations, f16 keys and values, order of sums. Where the two engines like different tokens best, the
position is listed with what each thinks of both, and the reference's word.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import llama_cpp_env, provenance
from benchmarks.arms import Crew
from benchmarks.command import option_parser, pin, save, show
from benchmarks.corpus import windows_text
from benchmarks.environment import InstallError
from benchmarks.markdown import markdown_table, provenance_table
from benchmarks.measure import round_to
from benchmarks.wire import Worker, WorkerError
from forerun.cli.progress import resolve
from forerun.errors import ForerunError

Engines = dict[str, Worker]

NUM_WINDOWS, WINDOW_TOKENS = 16, 256
_HEADER = ("engine", "mean KL in nats", "largest KL", "same top token")
_DIFFERING_HEADER = ("window", "position", "tokens", "forerun's margin", "llama.cpp's margin", "float32's, for forerun")
KL_FACTOR, KL_SLACK = 1.05, 1e-4  # our mean KL may be so much of llama.cpp's, plus this
MIN_AGREEMENT = 0.98  # of the two engines' best tokens


@dataclass(frozen=True, slots=True)
class Distance:
    """One engine beside the reference, on every position.

    Attributes:
        kl: [N] float64, KL(reference || served) in nats.
        is_same_top: [N] bool, both like the same token best.
    """

    kl: npt.NDArray[np.float64]
    is_same_top: npt.NDArray[np.bool_]

    @property
    def mean_kl(self) -> float:
        """Over all positions."""
        return float(self.kl.mean())

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "mean_kl": round_to(self.mean_kl),
            "standard_error": round_to(float(self.kl.std() / np.sqrt(len(self.kl)))),
            "max_kl": round_to(float(self.kl.max())),
            "top1_agreement": round_to(float(self.is_same_top.mean())),
        }


@dataclass(frozen=True, slots=True)
class Differing:
    """A position where the engines like different tokens best.

    Attributes:
        window, position: where.
        token_ids: forerun's best and llama.cpp's.
        margins: by how much, in logits, forerun and llama.cpp prefer their own, and the reference forerun's.
    """

    window: int
    position: int
    token_ids: tuple[int, int]
    margins: tuple[float, float, float]


def differing(
    window: int, own: npt.NDArray[np.float32], peer: npt.NDArray[np.float32], reference: npt.NDArray[np.float32]
) -> list[Differing]:
    """Of one window's logits [N, V]."""
    out = []
    ours, theirs = own.argmax(axis=1), peer.argmax(axis=1)
    for n in np.flatnonzero(ours != theirs):
        a, b = int(ours[n]), int(theirs[n])
        margins = (own[n, a] - own[n, b], peer[n, b] - peer[n, a], reference[n, a] - reference[n, b])
        first, second, third = (round_to(float(margin)) for margin in margins)
        out.append(Differing(window, int(n), (a, b), (first, second, third)))
    return out


def distance(reference: npt.NDArray[np.float32], served: npt.NDArray[np.float32]) -> Distance:
    """Of two arrays of logits [N, V], in float64."""
    log_p, log_q = _log_softmax(reference), _log_softmax(served)
    return Distance((np.exp(log_p) * (log_p - log_q)).sum(axis=1), reference.argmax(axis=1) == served.argmax(axis=1))


def joined(parts: list[Distance]) -> Distance:
    """All positions of the parts."""
    return Distance(np.concatenate([part.kl for part in parts]), np.concatenate([part.is_same_top for part in parts]))


def main() -> int:
    """Runs the comparison; the last line on standard output is one JSON document."""
    arguments = option_parser("fidelity").parse_args()
    console = Console(stderr=True)
    try:
        model_path = resolve(arguments.model)
        llama_cpp_python = llama_cpp_env.ensure_llama_cpp(console)
        cpus = pin(arguments.threads)
        with Crew(llama_cpp_python) as crew:
            reference, engines, peer_info = _load(crew, model_path, arguments.threads)
            windows = _windows(reference, model_path)
            distances, differences = _measure(reference, engines, windows, console)
    except (ForerunError, InstallError, WorkerError) as error:
        console.print(f"fidelity: {error}", style="red", markup=False, highlight=False)
        return 1
    where = provenance.collect("fidelity", model_path, arguments.threads, cpus, llama_cpp_env.versions(peer_info))
    document = {**_summary(distances, differences, windows), "provenance": where}
    save(f"fidelity-{model_path.stem}", document, _markdown(document))
    show(_table(document))
    show(_differing_table(document))
    for goal in document["goals"]:
        print(_goal_line(goal))
    print(json.dumps(document))
    return 0


def _load(crew: Crew, model_path: Path, num_threads: int) -> tuple[Worker, Engines, dict[str, Any]]:
    load = {"file": str(model_path), "num_threads": num_threads, "n_ctx": WINDOW_TOKENS}
    reference = crew.forerun("float32 reference")
    reference.ask("load", **load, backend="torch", kv="f32")
    own = crew.forerun("forerun")
    own.ask("load", **load)
    peer = crew.llama_cpp("llama.cpp")
    info = peer.ask("load", **load, n_batch=WINDOW_TOKENS)
    return reference, {"forerun": own, "llama.cpp": peer}, info


def _windows(worker: Worker, model_path: Path) -> list[list[int]]:
    texts = windows_text(NUM_WINDOWS, WINDOW_TOKENS)
    token_ids = worker.ask("token_ids", file=str(model_path), texts=texts)["token_ids"]
    return [ids[:WINDOW_TOKENS] for ids in token_ids]


def _measure(
    reference: Worker, engines: Engines, windows: list[list[int]], console: Console
) -> tuple[dict[str, Distance], list[Differing]]:
    parts: dict[str, list[Distance]] = {name: [] for name in engines}
    differences: list[Differing] = []
    with tempfile.TemporaryDirectory() as folder:
        for i, window in enumerate(track(windows, "comparing", console=console, transient=True)):
            expected = _logits(reference, window, Path(folder))
            served = {name: _logits(worker, window, Path(folder)) for name, worker in engines.items()}
            for name, logits in served.items():
                parts[name].append(distance(expected, logits))
            differences += differing(i, served["forerun"], served["llama.cpp"], expected)
    return {name: joined(distances) for name, distances in parts.items()}, differences


def _logits(worker: Worker, window: list[int], folder: Path) -> npt.NDArray[np.float32]:
    path = folder / "logits.npy"
    worker.ask("logits", token_ids=window, path=str(path))
    logits: npt.NDArray[np.float32] = np.load(path)
    return logits


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide


def _summary(distances: dict[str, Distance], differences: list[Differing], windows: list[list[int]]) -> dict[str, Any]:
    own, peer = distances["forerun"].mean_kl, distances["llama.cpp"].mean_kl
    limit = KL_FACTOR * peer + KL_SLACK
    num_tokens = sum(map(len, windows))
    agreement = 1 - len(differences) / num_tokens
    return {
        "mean_kl": [round_to(own), round_to(peer)],
        "top1_agreement": [round_to(float(distances[name].is_same_top.mean())) for name in ("forerun", "llama.cpp")],
        "engines_agree": round_to(agreement),
        "goals": [
            {"what": "mean KL", "value": round_to(own), "at_most": round_to(limit), "met": own <= limit},
            {
                "what": "positions where both engines like the same token best",
                "value": round_to(agreement),
                "at_least": MIN_AGREEMENT,
                "met": agreement >= MIN_AGREEMENT,
            },
        ],
        "num_tokens": num_tokens,
        "window_tokens": WINDOW_TOKENS,
        "token_ids_sha256": hashlib.sha256(json.dumps(windows).encode()).hexdigest(),
        "engines": {name: part.to_json() for name, part in distances.items()},
        "differing": [asdict(one) for one in differences],
    }


def _goal_line(goal: dict[str, Any]) -> str:
    bound = f"at most {goal['at_most']}" if "at_most" in goal else f"at least {goal['at_least']}"
    return f"{'met   ' if goal['met'] else 'MISSED'}  {goal['what']}: {goal['value']}, goal {bound}"


def _differing_table(document: dict[str, Any]) -> Table:
    table = Table(*_DIFFERING_HEADER, title="where the engines like different tokens best")
    for row in _differing_rows(document):
        table.add_row(*row)
    return table


def _differing_rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            str(one["window"]),
            str(one["position"]),
            "{}, {}".format(*one["token_ids"]),
            *(f"{margin:.3f}" for margin in one["margins"]),
        )
        for one in document["differing"]
    ]


def _table(document: dict[str, Any]) -> Table:
    table = Table(*_HEADER, title=f"distance from float32 over {document['num_tokens']} tokens")
    for row in _rows(document):
        table.add_row(*row)
    return table


def _markdown(document: dict[str, Any]) -> str:
    where = document["provenance"]
    return (
        "\n\n".join(
            [
                f"# Distance from float32: {where['model']}",
                f"{document['num_tokens']} tokens in windows of {document['window_tokens']} from Python's own language "
                "reference, every position; the reference is float32 arithmetic on the file's dequantised weights. "
                f"Written by `{where['command']}`.",
                markdown_table(_HEADER, _rows(document)),
                "\n".join(f"- {_goal_line(goal)}" for goal in document["goals"]),
                "## Where the engines like different tokens best",
                markdown_table(_DIFFERING_HEADER, _differing_rows(document)),
                provenance_table(where),
            ]
        )
        + "\n"
    )


def _rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            name,
            f"{part['mean_kl']:.3g} ± {part['standard_error']:.1g}",
            f"{part['max_kl']:.3g}",
            f"{100 * part['top1_agreement']:.2f} %",
        )
        for name, part in document["engines"].items()
    ]


if __name__ == "__main__":
    raise SystemExit(main())
