"""`tandem planner`: the roles of running workers, moved with their load."""
