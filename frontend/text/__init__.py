"""Models that read and write text themselves."""
