"""The loop that joins scheduler and WorkAgent, with what mends it: recovery, audits, and the beams of a search."""
