"""Code that runs in the WorkAgent process, which owns a device. Most modules import MindSpore."""
