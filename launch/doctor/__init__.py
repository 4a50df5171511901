"""`tandem doctor`: checks of this machine."""
