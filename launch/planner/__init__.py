"""`tandem planner`: roles and the number of running workers, changed with their load."""
