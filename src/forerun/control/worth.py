"""Whether asking the drafters pays at all: asking takes time too, and some texts hold nothing to draft from.

Asking costs a few percent of a pass of a small model, whatever comes of it. So a request whose drafts did not earn that
back rests: its drafters are asked for one step in `PEEK_STEPS` only, until one of them promises more than a token, or
until it is time for another trial.
"""

from __future__ import annotations

TRIAL_STEPS = 32  # steps before a judgement
REST_STEPS = 192
PEEK_STEPS = 8
WINDOW_STEPS = 64  # about how many steps are remembered
MIN_LOSS = 0.02  # share of the time that must have been lost; less is noise
WAKE_TOKENS = 2.0  # expected of a step


class Worth:
    """Keeps the account of one request.

    >>> worth = Worth()
    >>> for _ in range(TRIAL_STEPS):
    ...     worth.learn(1.0, 1.1, 1, 1.0)
    >>> [worth.asks() for _ in range(3) if worth.learn(1.0, 1.0, 1, 1.0) is None]
    [False, False, False]
    """

    def __init__(self) -> None:
        self._gain_s = self._seconds = 0.0  # decayed sums over the steps that were judged
        self._num_judged = 0
        self._rest_left = 0

    def asks(self) -> bool:
        """Whether the drafters are asked for the next step."""
        return self._rest_left % PEEK_STEPS == 0

    def learn(self, token_s: float, step_s: float, num_emitted: int, expected_tokens: float) -> None:
        """Takes in a step.

        Args:
            token_s: seconds in which the engine makes a token by plain decoding, for whomever.
            step_s: the same for the request's token of this step, and what its drafts cost everybody on top; a hitch
                counts as one plain token at most.
            num_emitted: tokens that came.
            expected_tokens: those that the controller had expected.
        """
        if self._rest_left:
            self._rest_left = 0 if expected_tokens >= WAKE_TOKENS else self._rest_left - 1
            return
        keep = 1.0 - 1.0 / WINDOW_STEPS
        self._gain_s = keep * self._gain_s + max(num_emitted * token_s - step_s, -token_s)
        self._seconds = keep * self._seconds + step_s
        self._num_judged += 1
        if self._num_judged >= TRIAL_STEPS and self._gain_s < -MIN_LOSS * self._seconds:
            self._gain_s, self._seconds, self._num_judged = 0.0, 0.0, 0
            self._rest_left = REST_STEPS - 1
