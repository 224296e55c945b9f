"""Benchmarks.  Each module runs as ``python -m bench.NAME`` and prints one JSON object as its last line."""
