"""`tandem top`: a cluster live in a terminal."""
