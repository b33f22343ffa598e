"""How large a model may say that it is.

Everything a file states is compared with its tensors in the end, shape by shape. These bounds hold before that, where a
number already decides how much is built: layers, RoPE frequencies, caches. They are far above any model there is, and
small enough that what follows from them fits into memory and into 32-bit arithmetic.
"""

from __future__ import annotations

from forerun.errors import LoadError

MAX_LAYERS = 4096  # the deepest models have a tenth of it
MAX_HIDDEN_SIZE = 1 << 17
MAX_INTERMEDIATE_SIZE = 1 << 20
MAX_HEADS = 1 << 12
MAX_HEAD_DIM = 1024
MAX_VOCAB_SIZE = 1 << 22  # the largest vocabularies have a sixteenth of it
MAX_POSITION = 2**31 - 1  # positions travel as int32

# What a number that is no count can sensibly be; within these bounds no formula overflows.
SMALLEST, LARGEST = 1e-13, 1e13

# How many times as wide as the residual stream the parts of a layer may be; real ones are 4 and 8 times as wide at
# most. Caches and activations grow with the widths, files with their products: without a bound, a small file of thin
# matrices would cost gigabytes.
MAX_HEADS_RATIO = 32
MAX_INTERMEDIATE_RATIO = 256


def check_widths(where: str, hidden_size: int, attention_width: int, intermediate_size: int) -> None:
    """Compares the parts of a layer with the residual stream.

    Args:
        where: the file, for messages.
        hidden_size: of the residual stream.
        attention_width: numbers of all query heads.
        intermediate_size: of the gated feed-forward part.
    Raises:
        LoadError: a part is more times as wide than is supported.
    """
    parts = (
        ("heads", "are", attention_width, MAX_HEADS_RATIO),
        ("a feed-forward part", "is", intermediate_size, MAX_INTERMEDIATE_RATIO),
    )
    for what, verb, width, ratio in parts:
        if width > ratio * hidden_size:
            raise LoadError(
                f"{where}: {what} of {width} numbers {verb} not supported with a hidden size of {hidden_size}, "
                f"at most {ratio} times as many are"
            )
