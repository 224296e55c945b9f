"""Engines: what samples tokens for a policy.  Each implements ``core.ports.SamplingEngine``."""
