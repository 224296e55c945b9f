"""Engines and trainers, as control sees them."""
