"""Executors run steps on WorkAgents. They start these processes, and replace them when they exit."""
