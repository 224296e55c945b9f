"""Starting Wingbeat's processes: the local supervisor, and a whole training run on top of it."""
