"""Networks as lists of operations: description language, rewriting rules, sharding rules, and encoding as programs."""
