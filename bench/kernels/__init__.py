"""The kernels on one GPU."""
