"""How often proposed tokens turn out right.

A node's acceptance is conditional: it counts only where its parent was emitted. Drafters sort their nodes into cells of
about equal acceptance; a table keeps one rate per cell for all requests, and each request shifts them by an odds factor
of its own, because some texts are easier than others.

`AcceptanceTable(priors)` has decayed counts of trials and successes per cell, on top of five trials at the prior's
rate; `rate` is strictly between 0 and 1. `RequestRates(table)` are its rates as they hold for one request: the odds are
those of the table times a factor in [1/4, 4], whose logarithm follows the gradient of the log-likelihood, as the
intercept of a logistic regression would. What it records goes to the table too. `RequestRates.score` compares a
proposal, verified or not, with the tokens that came: what was emitted doesn't depend on it.

>>> table = AcceptanceTable((0.5,))
>>> RequestRates(table).score((7, 8), (-1, 0), (0, 0), (7,))
>>> round(table.rate(0), 3)
0.583
"""

from forerun._native import AcceptanceTable, RequestRates

__all__ = ["AcceptanceTable", "RequestRates"]
