"""The CPU operator library (csrc/): how it is compiled and loaded, and what its kernels must compute, in NumPy."""
