"""`forerun certify`: is speculation exact here?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.display import note
from forerun.cli.jsonlines import dumps
from forerun.cli.options import EngineOptions, SpeculationOptions
from forerun.cli.progress import ProgressBar, resolve
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.bench.certify import Certificate

DEFAULT_MINUTES = 13.0  # loading comes on top, and all of it stays under a quarter of an hour


def certify(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A GGUF file, a Hugging Face folder or a name such as demo.")
    ],
    speculation: SpeculationOptions,
    engine: EngineOptions,
    minutes: Annotated[float, typer.Option(min=0.0, help="About how long it may take.")] = DEFAULT_MINUTES,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON report there too.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the JSON report alone.")] = False,
) -> None:
    """Certify that speculation changes nothing but speed, for this model, drafter and rule on this machine.

    Compares answers with plain decoding's over prompts and parameters, tests the law of sampled tokens, and runs
    controls that must fail. Exits with 1 when anything isn't as it must be.
    """
    from forerun.bench.certify import certify as run
    from forerun.bench.provenance import provenance
    from forerun.drafters.spec import Speculation

    active = Speculation.parse(speculation.spec)
    if active.is_off:
        raise ConfigError(f"--spec is {speculation.spec!r}, but must name a drafter or auto")
    active.check_rule(speculation.verify)
    path = resolve(model)
    llm = engine.load(path)
    with ProgressBar(f"certifying {active} under {speculation.verify}") as bar:
        certificate = run(llm, active, speculation.verify, max_s=60.0 * minutes, progress=bar.update)
    data: dict[str, Any] = {
        "certify": path.name,
        "spec": str(active),
        "verify": speculation.verify,
        "passed": certificate.passed,
        "checks": [asdict(check) for check in certificate.checks],
        "num_drafted": certificate.num_drafted,
        "num_accepted": certificate.num_accepted,
        "seconds": round(certificate.seconds, 1),
        "provenance": provenance(path),
    }
    if out is not None:
        out.write_text(dumps(data) + "\n")
    if not json:
        _print_table(certificate, f"{path.name}, {active}, rule {speculation.verify}")
    print(dumps(data))
    if not certificate.passed:
        failed = [check.name for check in certificate.checks if not check.passed]
        note(f"forerun: NOT exact: {len(failed)} checks failed, first {failed[0]!r}")
        raise typer.Exit(1)


def _print_table(certificate: Certificate, title: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for column in ("check", "", "found"):
        table.add_column(column)
    for check in certificate.checks:
        table.add_row(check.name, "ok" if check.passed else "FAILED", check.detail)
    console = Console() if Console().is_terminal else Console(width=160)
    console.print(table)
    verdict = "exact, as far as was checked" if certificate.passed else "NOT exact"
    console.print(f"{verdict}; {certificate.seconds:.0f} s")
