"""Who owns which page of the KV cache; knows ids, never bytes."""
