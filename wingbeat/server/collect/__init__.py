"""Conversations of an application become episodes, and feedback their rewards."""
