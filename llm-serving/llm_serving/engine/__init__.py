"""The step loop of a replica around its scheduler and WorkAgent, with recovery, audits and beam search."""
