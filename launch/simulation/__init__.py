"""`tandem plan`: a load on every layout of workers, under a virtual clock."""
