"""The conformance kit: checks of an engine against its contract."""
