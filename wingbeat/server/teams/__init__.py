"""One episode on several servers: two phases."""
