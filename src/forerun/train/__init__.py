"""Training of draft heads: text that the target itself writes, and what learns from it."""
