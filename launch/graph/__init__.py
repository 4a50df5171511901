"""`tandem run`: graphs of services."""
