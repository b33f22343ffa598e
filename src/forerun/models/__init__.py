"""From a model file to weights, a forward pass written in `ops`, a tokenizer and a chat template."""
