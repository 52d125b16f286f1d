"""Code that runs in the WorkAgent, beside its device. Most of it imports MindSpore."""
