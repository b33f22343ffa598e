"""A text that every machine has: the language reference that Python ships for its `help()`, one window per topic.

It is prose, tables and code under Python's own licence. Its wording follows the Python version, so a result names the
hash of the token ids it was measured on.
"""

from __future__ import annotations

from pydoc_data.topics import topics

_MIN_CHARACTERS_PER_TOKEN = 8  # far more than any tokenizer needs for English, so a chosen topic fills its window


def windows_text(num_windows: int, window_tokens: int) -> list[str]:
    """Beginnings of so many topics, evenly spread over all that are long enough, in alphabetical order.

    Raises:
        ValueError: there are not that many.
    """
    size = window_tokens * _MIN_CHARACTERS_PER_TOKEN
    names = [name for name in sorted(topics) if len(topics[name]) >= size]
    if len(names) < num_windows:
        raise ValueError(
            f"{num_windows} windows of {window_tokens} tokens wanted, but only {len(names)} topics are long enough"
        )
    return [topics[names[i * len(names) // num_windows]][:size] for i in range(num_windows)]
