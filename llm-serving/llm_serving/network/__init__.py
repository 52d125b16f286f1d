"""Networks as lists of operations: description, rewriting, sharding, and encoding as integers for the C++ kernels."""
