"""Drafters: whatever guesses the next tokens. See `base` for the contract and the registry."""
