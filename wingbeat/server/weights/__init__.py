"""How weights get from the trainer's host to engines on others: files over HTTP, and who pulls from whom."""
