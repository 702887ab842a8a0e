"""The OpenAI-compatible server: requests over HTTP to the engine, answers as JSON or streams."""
