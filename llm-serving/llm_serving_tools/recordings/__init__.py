"""Recordings of the scheduler: their replay and reports of it."""
