"""Measurements: kernels, decoding, and how far the served model is from its float32 form."""
