"""From finished episodes to training batches: groups, admission, buffers and the ledger.  No torch."""
