"""The main programs of engine and trainer workers: processes that dial out to control."""
