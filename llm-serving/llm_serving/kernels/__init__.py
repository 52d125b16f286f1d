"""The CPU operator library (csrc/), how to compile and load it, and the NumPy definitions of its kernels."""
