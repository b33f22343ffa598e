"""The decoding engine: requests, the step, and the `LLM` class on top."""
