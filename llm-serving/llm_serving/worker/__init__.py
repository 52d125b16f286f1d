"""Code that runs in the WorkAgent, next to its device. Most modules import MindSpore."""
