"""The command line: which commands there are, and how a failure is told.

    forerun generate | chat | serve | info | certify | drafters | datastore | pull | models
    forerun bench kernels | decode | spec | serve

Exit codes: 0, 1 for a failure, 2 for a request or a setting that can't be served, 130 after ctrl-c.
Commands live in one module each and import the engine only once they run, so that help is instant.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

from forerun import __version__
from forerun.cli import bench, certify, chat, datastore, drafters, generate, info, serve, store
from forerun.cli.options import with_environment, with_groups
from forerun.errors import ConfigError, ForerunError, RequestError

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="forerun",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(with_groups(generate.generate))
app.command()(with_groups(chat.chat))
app.command()(with_environment(with_groups(serve.serve)))
app.command()(with_groups(info.info))
app.command()(with_groups(certify.certify))
app.command()(drafters.drafters)
app.command()(with_groups(datastore.datastore))
app.add_typer(bench.app, name="bench")
app.command()(store.pull)
app.add_typer(store.models_app, name="models")


@app.callback(invoke_without_command=True)
def forerun(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Language models on your own machine: speculation that changes nothing but speed.

    MODEL is a GGUF file, a Hugging Face folder, or what `forerun pull` has fetched: a name such as demo, or
    hf:org/name[:file].
    """
    if version:
        from forerun.ops.native import chosen_isa

        typer.echo(f"forerun {__version__}, native backend with {chosen_isa()}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


def run() -> None:
    """The entry point: runs a command, tells a failure in one line on stderr, and exits."""
    code = _run()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone, which is its right (`forerun ... | head`); Python must not complain when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _run() -> int:
    try:
        code = app(prog_name="forerun", standalone_mode=False)
    except ForerunError as error:
        return _fail(str(error), EXIT_USAGE if isinstance(error, ConfigError | RequestError) else EXIT_FAILURE)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_FAILURE
    except Exception as error:
        # Usage errors are known by their shape: their class lives in click, or inside typer, depending on its version.
        if hasattr(error, "format_message"):
            return _fail_usage(error.format_message(), getattr(error, "ctx", None))
        if os.environ.get("FORERUN_DEBUG"):
            traceback.print_exc()
            return EXIT_FAILURE
        return _fail(
            f"{type(error).__name__}: {error}. This is a fault of forerun; set FORERUN_DEBUG=1 for the traceback",
            EXIT_FAILURE,
        )
    return code if isinstance(code, int) else 0


def _fail_usage(message: str, context: typer.Context | None) -> int:
    if not message:  # a group without its command has shown its help
        return EXIT_USAGE
    return _fail(f"{message} (see '{context.command_path if context else 'forerun'} --help')", EXIT_USAGE)


def _fail(message: str, code: int) -> int:
    print("forerun:", " ".join(message.split()), file=sys.stderr)
    return code
