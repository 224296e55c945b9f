"""Control: the process that owns episodes, token graphs, the ledger and the schedule.  Never imports torch."""
