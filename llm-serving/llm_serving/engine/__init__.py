"""The loop that joins scheduler and WorkAgent, and what surrounds it."""
