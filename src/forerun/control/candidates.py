"""Proposals of several drafters as one tree, and the choice of the nodes that pay.

With s(n) the probability that node n is emitted, 1 + sum s(n) tokens come out of a step. The rate rule takes the nodes
that maximise

    1 + sum of s(n) over the chosen nodes - price * seconds of a pass over them,

with `price` the tokens per second that the engine makes otherwise (Dinkelbach's form of "most tokens per second"). s
never grows along a path, so the first N nodes by s are a tree for every N, and N is found by trying all: a pass gets
dearer in steps, not evenly.

Where several requests run, their nodes are one order: a row goes to whichever request it brings most. `price` then is
what all of them make together, so the more run, the dearer is time, and in the end no node is worth its row.

`Candidates` are one request's. They grow by merging proposals: nodes of one parent and one token are one node, which
keeps the larger rate and whose that is. Siblings exclude each other, so together they are emitted with at most 1. Nodes
of a fixed proposal come first and are verified whatever they cost; `choose_nodes` takes them alone where there are no
costs or `takes_paying` is off. For each request it returns token ids and parents of the chosen nodes, for each its
proposal (they count from 0) and its index there, the number of candidates, that of fixed ones, and the tokens that are
expected of the step.

>>> from forerun.control.acceptance import AcceptanceTable, RequestRates
>>> from forerun.control.cost import CostCurve, StepCosts
>>> rates = RequestRates(AcceptanceTable((0.9, 0.1)))
>>> candidates = Candidates()
>>> candidates.merge((5, 6, 7), (-1, 0, -1), (0, 0, 1), False, rates)
>>> costs = StepCosts(CostCurve((1, 2, 3, 4), (1.0, 1.1, 1.2, 1.3), 0, 0.0, 0.0))
>>> [choice] = choose_nodes([candidates], [8], True, costs, 1, 1, 0.0, 64, 1.0)
>>> choice[:4]
((5, 6), (-1, 0), (0, 0), (0, 1))
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun._native import Candidates, choose_nodes

__all__ = ["Candidates", "choose_nodes", "least_survival"]


def least_survival(seconds: Sequence[float], price: float) -> float:
    """What the likeliest node must survive with for any draft to pay: the least that a row costs when taken by many.

    Args:
        seconds: of a step with 0, 1, ... nodes.
        price: tokens per second that the engine makes otherwise.

    >>> least_survival([1.0, 1.5, 1.5], 2.0)
    0.5
    """
    return max(0.0, price * min([(s - seconds[0]) / n for n, s in enumerate(seconds) if n], default=0.0))
