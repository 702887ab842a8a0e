"""A certificate that speculation changes nothing, for one build, model, drafter and options."""
