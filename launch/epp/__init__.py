"""`tandem epp`: the endpoint picker of a Gateway. Its packages are those of the extra `gateway`."""
