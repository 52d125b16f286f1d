"""Code of the WorkAgent process, which owns a device. Most modules import MindSpore."""
