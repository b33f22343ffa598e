"""`python -m benchmarks.openvino_export SOURCE FOLDER SETTINGS`: a GGUF file in OpenVINO's format, quantised.

Run by the peer's own interpreter. The weights go through float32; the tokenizer stays behind, since the benchmark gives
token ids. (transformers 5.5.4 takes some GGUF tokenizers for another family's.)
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
from transformers import AutoModelForCausalLM


def export(source: Path, folder: Path, settings: dict[str, Any]) -> None:
    """Writes the model into an existing folder.

    Args:
        source: the GGUF file.
        folder: gets openvino_model.xml and .bin and the configs.
        settings: keyword arguments of the weight quantisation.
    """
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    with tempfile.TemporaryDirectory(dir=folder) as unquantised:
        model.save_pretrained(unquantised)
        del model
        quantisation = OVWeightQuantizationConfig(**settings)
        exported = OVModelForCausalLM.from_pretrained(unquantised, export=True, quantization_config=quantisation)
        exported.save_pretrained(folder)


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
