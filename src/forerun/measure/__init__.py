"""Measuring: fair comparisons of plain and speculative runs, and where a figure comes from."""
