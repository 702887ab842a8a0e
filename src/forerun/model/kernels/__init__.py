"""Compiled CPU kernels for what lies between the linear layers (numba; see `ops.NumbaOps`)."""
