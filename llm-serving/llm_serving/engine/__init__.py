"""The step loop of a replica, with the scheduler and the WorkAgent; recovery, audits and beam search."""
