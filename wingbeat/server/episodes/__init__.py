"""The life of an episode: lease, begin, finish, groups, recovery."""
