"""Rules that are exact but not offered: oracles for tests, and what comparisons compare with.

Each is dominated, or dearer for what it gains, by a rule that is offered. They are `Rule`s like any other, but `RULES`
doesn't hold them, so no request can name them.
"""
