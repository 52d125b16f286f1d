"""Executors run steps on WorkAgents, start these processes, and replace them when they exit."""
