"""The engine: requests in, tokens out, by plan, draft, verify, accept, commit."""
