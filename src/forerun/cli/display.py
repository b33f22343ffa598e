"""How text reaches the terminal: what was drafted and accepted is coloured and underlined, the rest is left alone."""

from __future__ import annotations

import os
import sys
from typing import TextIO

# Colour is never the only sign: the underline says the same to those who can't tell the colours, and under NO_COLOR.
_GREEN_UNDERLINED = "\x1b[32;4m"
_UNDERLINED = "\x1b[4m"
_RESET = "\x1b[0m"

# A model must not move the cursor or ring the bell of a terminal; newline and tab are text.
_CONTROLS = {
    code: "\N{REPLACEMENT CHARACTER}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}


class TextPrinter:
    """Writes pieces of an answer as they come. Off a terminal it writes exactly the text, and `finish` one newline."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._mark = _UNDERLINED if os.environ.get("NO_COLOR") else _GREEN_UNDERLINED
        self._has_marks = self._is_terminal and os.environ.get("TERM") != "dumb"
        self._at_line_start = True

    def write(self, text: str, is_draft: bool) -> None:
        """Writes the text of one token and flushes."""
        if not text:
            return
        self._at_line_start = text.endswith("\n")
        if self._is_terminal:
            text = text.translate(_CONTROLS)
        if self._has_marks and is_draft:
            # Marks end before a newline, or the terminal would paint the rest of the line.
            text = "\n".join(f"{self._mark}{line}{_RESET}" if line else "" for line in text.split("\n"))
        self._out.write(text)
        self._out.flush()

    def finish(self) -> None:
        """Ends the line unless the text did, so that what follows starts on its own."""
        if not self._at_line_start:
            self._out.write("\n")
            self._out.flush()
        self._at_line_start = True


def note(message: str) -> None:
    """One line for the person, on stderr."""
    print(message, file=sys.stderr, flush=True)
