"""`tensor-memory run | sweep | report | list`: one file per command, and what they share."""
