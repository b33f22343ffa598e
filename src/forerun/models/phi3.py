"""Phi-3, Phi-3.5 and Phi-4: q, k and v in one tensor, gate and up in one, LongRoPE, perhaps RoPE on a part of a head.

The window of a file is that of every layer, as in the original; llama.cpp ignores it.
"""

from __future__ import annotations

from forerun.models.family import Family, windowed_attentions
from forerun.models.rope import LONG_FACTORS, SHORT_FACTORS

PHI3 = Family(
    attentions=windowed_attentions,
    is_fused=True,
    rotates_partly=True,
    rope_tensors=(LONG_FACTORS, SHORT_FACTORS),
)
