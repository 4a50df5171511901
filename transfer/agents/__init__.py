"""Transfer agents: threads that move blocks, one per rank, and the links that they measure."""
