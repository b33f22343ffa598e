"""Measurements against other engines: scripts/bench runs them, results/ keeps what they found."""
