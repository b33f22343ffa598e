"""OLMo 2 and OLMo 3: no norm before attention or feed-forward part but one after each, q and k normed over all heads.

OLMo 3 gives three layers of four a window and leaves their RoPE unscaled. A file without a window is OLMo 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.models.config import Keys
from forerun.models.family import Family, alternating_attentions, full_attentions
from forerun.models.rope import DEFAULT_BASE, plain_rope
from forerun.ops.base import AttentionSpec

_PERIOD = 4


def _attentions(keys: Keys, alike: AttentionSpec, context_length: int) -> Sequence[AttentionSpec]:
    if keys.window(context_length) is None:
        return full_attentions(keys, alike, context_length)
    base = keys.number("rope.freq_base_swa", default=keys.number("rope.freq_base", default=DEFAULT_BASE))
    local_rope = plain_rope(base, 2 * len(alike.inv_freq))
    return alternating_attentions(keys, alike, context_length, period=_PERIOD, local_rope=local_rope)


OLMO2 = Family(
    attentions=_attentions,
    layer_norms=("post_attention_norm", "post_ffw_norm"),
    head_norms="all",
    own_keys=("attention.sliding_window_pattern", "rope.freq_base_swa"),
)
