"""What runs beside a device. Importing any of it imports MindSpore, and the operator library before that."""

from llm_serving.kernels import library

library.map_if_built()
