"""Qwen3: an RMSNorm on each head of q and k, no biases, a head size of its own. A window is refused as for Qwen2."""

from __future__ import annotations

from forerun.models.family import Family, full_attentions
from forerun.models.rope import FREQ_FACTORS

QWEN3 = Family(attentions=full_attentions, head_norms="each", rope_tensors=(FREQ_FACTORS,))
