"""From the description of a network to what MindSpore compiles: one operator that runs a program, or Cells."""
