"""The HTTP API: an OpenAI-compatible server whose completions can carry activations and steering (docs/server.md)."""
