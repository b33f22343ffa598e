"""The HTTP server: OpenAI's API over the engine's worker."""
