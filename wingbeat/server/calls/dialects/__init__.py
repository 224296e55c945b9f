"""Wire dialects: pure functions between a client's JSON and :mod:`wingbeat.server.calls.model_call`."""
