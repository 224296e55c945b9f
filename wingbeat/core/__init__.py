"""The nouns every other package shares: types, wire models, errors, ports, events and configuration."""
