"""Drafters propose tokens and never decide: one file per drafter, one line each in the registry of `spec`."""
