"""The configuration that serves a goal best, looked for in simulations."""
