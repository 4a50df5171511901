"""The engine's own decoder: layer after layer over the residual stream, calling kernels."""
