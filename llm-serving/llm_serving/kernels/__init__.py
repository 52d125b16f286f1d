"""The operations of a decoder on a CPU: a C++ library for MindSpore's operator plugin, and what it must compute."""
