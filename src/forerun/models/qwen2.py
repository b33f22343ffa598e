"""Qwen2 and Qwen2.5: biases on q, k and v.

The layers that have a window in the original, from `max_window_layers` on, are not told in a GGUF file, so a window is
refused.
"""

from __future__ import annotations

from forerun.models.family import Family, full_attentions
from forerun.models.rope import FREQ_FACTORS

QWEN2 = Family(attentions=full_attentions, qkv_bias="required", rope_tensors=(FREQ_FACTORS,))
