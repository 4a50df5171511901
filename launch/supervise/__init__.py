"""Child processes: started, watched, started again, and ended together."""
