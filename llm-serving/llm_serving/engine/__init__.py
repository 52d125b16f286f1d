"""The engine of a replica, which schedules steps and runs them on the WorkAgent; recovery, audits and beam search."""
