"""Draft heads on disk: read, checked, converted and written. How they compute is not here."""
