"""How often proposed tokens turn out right.

A node's acceptance is conditional: it counts only where its parent was emitted. Drafters sort their nodes into cells of
about equal acceptance; a table keeps one rate per cell for all requests, and each request shifts them by an odds factor
of its own, because some texts are easier than others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

PRIOR_WEIGHT = 5.0  # observations that a prior rate counts for
DECAY = 0.99  # an observation counts half after about 70 more of its cell
MAX_LOG_ODDS = math.log(4.0)
ODDS_STEP = 0.1  # step of the stochastic gradient on a request's log-odds
_MIN_RATE, _MAX_RATE = 1e-3, 1.0 - 1e-3


class AcceptanceTable:
    """Decayed counts of trials and successes per cell, on top of PRIOR_WEIGHT trials at the prior's rate.

    Args:
        priors: starting rate of each cell.

    >>> table = AcceptanceTable((0.5,))
    >>> table.record(0, True)
    >>> round(table.rate(0), 3)
    0.583
    """

    def __init__(self, priors: Sequence[float]) -> None:
        self._priors = tuple(priors)
        self.clear()

    def clear(self) -> None:
        """Back to the priors."""
        self._trials = [0.0] * len(self._priors)
        self._successes = [0.0] * len(self._priors)

    def rate(self, cell: int) -> float:
        """Estimated acceptance, strictly between 0 and 1."""
        rate = (PRIOR_WEIGHT * self._priors[cell] + self._successes[cell]) / (PRIOR_WEIGHT + self._trials[cell])
        return min(max(rate, _MIN_RATE), _MAX_RATE)

    def record(self, cell: int, is_right: bool) -> None:
        """Takes in one observation."""
        self._trials[cell] = DECAY * self._trials[cell] + 1.0
        self._successes[cell] = DECAY * self._successes[cell] + is_right


class RequestRates:
    """The rates of a table as they hold for one request: its odds are those of the table times a factor in [1/4, 4].

    The factor's logarithm follows the gradient of the log-likelihood, as the intercept of a logistic regression would.

    Args:
        table: shared by all requests; observations go there too.
    """

    def __init__(self, table: AcceptanceTable) -> None:
        self._table = table
        self._log_odds = 0.0
        self._factor = 1.0

    def rate(self, cell: int) -> float:
        """Estimated acceptance of the cell in this request."""
        rate = self._table.rate(cell)
        return rate * self._factor / (1.0 - rate + rate * self._factor)

    def record(self, cell: int, is_right: bool) -> None:
        """Takes in one observation."""
        log_odds = self._log_odds + ODDS_STEP * (is_right - self.rate(cell))
        self._log_odds = min(max(log_odds, -MAX_LOG_ODDS), MAX_LOG_ODDS)
        self._factor = math.exp(self._log_odds)
        self._table.record(cell, is_right)
