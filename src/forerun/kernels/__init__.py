"""Compiled CPU kernels (numba): what lies between the linear layers, and drawing a token."""
