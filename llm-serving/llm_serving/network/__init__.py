"""Networks as lists of operations: their description, rewriting rules, sharding rules, and encoding as programs."""
