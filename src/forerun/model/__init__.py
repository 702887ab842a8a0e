"""The target model: its files, its shape and its one forward pass."""
