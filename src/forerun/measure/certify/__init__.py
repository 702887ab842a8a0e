"""The losslessness certificate: evidence that speculation leaves the output as it was."""
