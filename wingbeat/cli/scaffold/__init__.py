"""The files that ``wingbeat init`` copies: a project that trains at once, to be changed piece by piece."""
