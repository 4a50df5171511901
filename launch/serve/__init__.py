"""`tandem serve`: topologies and the roles that they start."""
