"""`forerun pull` and `forerun models`: the models in the user's cache."""

from __future__ import annotations

from typing import Annotated

import typer

from forerun.cli.display import note
from forerun.cli.progress import ProgressBar

models_app = typer.Typer()


def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A known name, or hf:org/name[:file].")],
) -> None:
    """Fetch a model into the cache; nothing is fetched that is there already.

    Known names: demo, qwen-coder-1.5b, qwen-coder-0.5b, gemma3-270m.
    """
    from forerun.models.pull import pull as pull_model

    with ProgressBar(f"fetching {name}", is_bytes=True) as bar:
        path = pull_model(name, bar.update)
    note(f"forerun: {name} is at {path}")


@models_app.callback(invoke_without_command=True)
def models(context: typer.Context) -> None:
    """List the known models and which of them are in the cache, or remove one."""
    if context.invoked_subcommand is not None:
        return
    from forerun.models.pull import list_models
    from forerun.models.store import KNOWN_MODELS

    pulled = {stored.name: stored for stored in list_models()}
    for name, model in KNOWN_MODELS.items():
        where = str(pulled[name].path) if name in pulled else "not pulled"
        print(f"{name:16} {model.size_bytes / 1e6:>6.0f} MB  {where}  ({model.note})")


@models_app.command()
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name that `forerun models` lists.")],
) -> None:
    """Remove a model from the cache."""
    from forerun.models.pull import remove_model

    note(f"forerun: {name} is removed, {remove_model(name) / 1e6:.0f} MB are free again")
