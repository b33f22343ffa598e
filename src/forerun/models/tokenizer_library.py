"""How the `tokenizers` library ends where it can't go on.

It raises plain Exceptions. Where it did not foresee a file or a text it panics, which in Python is a BaseException that
passes every handler. Here both become errors of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tokenizers

from forerun.errors import ForerunError, RequestError, one_line


@contextmanager
def library_errors(make_error: Callable[[str], ForerunError]) -> Iterator[None]:
    """Turns what the library raises within into an error made from its words."""
    try:
        yield
    except BaseException as error:
        # Its type can't be imported. Anything else that is no Exception, such as Ctrl-C, is not the library's.
        is_panic = type(error).__name__ == "PanicException"
        if isinstance(error, ForerunError) or not (is_panic or isinstance(error, Exception)):
            raise
        raise make_error(one_line(error)) from error


def library_encode(
    whole: tokenizers.Tokenizer, continued: tokenizers.Tokenizer | None = None
) -> Callable[[str, bool], list[int]]:
    """`Codec.encode` by the library.

    Args:
        whole: for a text that begins a prompt.
        continued: for one that continues it; None is the same.
    Returns:
        A function that raises RequestError for a text on which the library gives up.
    """

    def encode(text: str, continues: bool) -> list[int]:
        chosen = continued if continues and continued is not None else whole
        with library_errors(_cannot_encode):
            ids: list[int] = chosen.encode(text, add_special_tokens=False).ids
        return ids

    return encode


def _cannot_encode(words: str) -> RequestError:
    return RequestError(f"the model's tokenizer can't encode this text: {words}")
