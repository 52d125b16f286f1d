"""What happened and why: the journal of steps, its explanations, and the numbers of `/metrics`."""
