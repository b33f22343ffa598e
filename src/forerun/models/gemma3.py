"""Gemma 3, text only: norms after attention and feed-forward part too; most layers have a window and their own RoPE.

A GGUF file holds each norm's weight with the 1 the original adds. Of six layers one sees everything, with the base and
linear scaling the file names; the others have the window and an unscaled RoPE of base 10000.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forerun.models.config import Keys
from forerun.models.family import Family, alternating_attentions
from forerun.models.rope import plain_rope
from forerun.ops.base import AttentionSpec

_PERIOD = 6
_LOCAL_BASE = 10000.0
_LAYERS_OF_27B = 62


def _attentions(keys: Keys, alike: AttentionSpec, context_length: int) -> Sequence[AttentionSpec]:
    if keys.get("attention.sliding_window") is None:
        raise keys.fail("attention.sliding_window", "is missing")
    if alike.rope_magnitude != 1.0:
        raise keys.fail(
            "rope.scaling.type", f"gives RoPE a magnitude of {alike.rope_magnitude}, which is not supported"
        )
    if keys.size("block_count") == _LAYERS_OF_27B:
        # The one size whose scores are scaled by hidden size / heads, 168, and not by the head size, 128. No key says
        # so; llama.cpp too goes by the number of layers.
        alike = replace(alike, scale=(keys.size("embedding_length") / alike.num_heads) ** -0.5)
    local_base = keys.number("rope.freq_base_swa", default=_LOCAL_BASE)
    local_rope = plain_rope(local_base, 2 * len(alike.inv_freq))
    return alternating_attentions(keys, alike, context_length, period=_PERIOD, local_rope=local_rope)


GEMMA3 = Family(
    attentions=_attentions,
    layer_norms=("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
    head_norms="each",
    own_keys=("attention.sliding_window_pattern", "rope.freq_base_swa"),
    activation="gelu_tanh",
    scales_embedding=True,
)
