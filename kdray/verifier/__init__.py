"""One rank of the target: a shard that verifies draft trees, its KV cache, its collectives."""
