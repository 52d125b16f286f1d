"""Executors run steps on WorkAgents. They start the WorkAgent processes, and replace a process that exits."""
