"""The place memory's recurrence, its reference beside the fast ones; `place_scan` is the way in."""
