"""Networks as lists of operations: the description language, rewriting and sharding rules, and the program encoding."""
