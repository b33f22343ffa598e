"""`python -m benchmarks.bf16_export SOURCE FOLDER`: a GGUF file as a Hugging Face folder in bf16.

Run by the peer's own interpreter. What the file has of a tokenizer and a chat template goes along.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def export(source: Path, folder: Path) -> None:
    """Writes the model into an existing folder.

    Args:
        source: the GGUF file.
        folder: gets the weights, the config and the tokenizer.
    """
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    # A model read from GGUF counts as quantised and can't be saved, though its weights have been expanded.
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
