"""The CPU operator library (csrc/): how it is compiled and loaded, and, in NumPy, what its kernels must compute."""
