"""``python -m wingbeat.cli`` is ``wingbeat``."""

from wingbeat.cli.main import main

main()
