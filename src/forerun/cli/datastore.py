"""`forerun datastore`: has a model write the texts that drafters look in."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.display import note
from forerun.cli.options import LoadOptions
from forerun.cli.progress import ProgressBar, resolve
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forerun.engine.llm import LLM

DEFAULT_TOKENS = 250_000


def datastore(
    load: LoadOptions,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A GGUF file, a Hugging Face folder or a name such as demo.")
    ] = "demo",
    tokens: Annotated[int, typer.Option(min=1, max=4_000_000, help="How much to write, about.")] = DEFAULT_TOKENS,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, other texts.")] = 0,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON lines with turns or prompt to answer; default: the model's own ideas."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write; default: the cache.")] = None,
) -> None:
    """Have a model write texts, which drafters then look in: speculation gets faster, and no token changes.

    Ctrl-c ends it early and keeps what was written.
    """
    from forerun.bench.prompts import read_prompts
    from forerun.drafters.datastore import check_writable, own_path, write_datastore
    from forerun.engine.llm import LLM

    questions = [prompt.text for prompt in read_prompts(prompts)] if prompts else []
    llm = LLM(resolve(model), quant=load.quant, kv=load.kv, threads=load.threads)
    path = out or own_path(llm.datastore_name)
    check_writable(path)
    began = time.perf_counter()
    texts, is_whole = _write(llm, tokens, seed, questions)
    if not texts:
        raise ConfigError("ctrl-c came before the first text was finished, so there is no datastore")
    num_tokens = sum(map(len, texts))
    about: dict[str, Any] = {
        "model": model,
        "seed": seed,
        "prompts": prompts.name if prompts else None,
        "num_tokens": num_tokens,
    }
    write_datastore(path, texts, about)
    rate = num_tokens / (time.perf_counter() - began)
    how = "" if is_whole else ", as far as it went,"
    note(f"forerun: {len(texts)} texts with {num_tokens} tokens{how} are at {path}; {rate:.0f} tokens/s")


def _write(llm: LLM, num_tokens: int, seed: int, questions: Sequence[str]) -> tuple[list[tuple[int, ...]], bool]:
    """Texts of at least so many tokens in all, and whether there are so many."""
    from forerun.engine.own_texts import write_texts

    texts: list[tuple[int, ...]] = []
    num_written = 0
    with ProgressBar("writing texts") as bar:
        try:
            for text in write_texts(llm, seed, questions):
                texts.append(text)
                num_written += len(text)
                bar.update(min(num_written, num_tokens), num_tokens)
                if num_written >= num_tokens:
                    break
        except KeyboardInterrupt:
            return texts, False
    return texts, True
