"""Llama and its relatives in the same form: SmolLM2, TinyLlama, Mistral.

A GGUF file of this family holds the rows of q and k, and their biases, in the order that turns neighbours (2i, 2i + 1)
into RoPE pairs, so the weights are used as they are and RoPE is `interleaved`. Llama 3.1's scaling comes as a tensor of
frequency factors. A window, as in the first Mistral, is that of every layer.
"""

from __future__ import annotations

from forerun.models.family import Family, windowed_attentions
from forerun.models.rope import FREQ_FACTORS

LLAMA = Family(
    attentions=windowed_attentions,
    rope_style="interleaved",
    qkv_bias="optional",
    may_have_output_bias=True,
    rope_tensors=(FREQ_FACTORS,),
)
