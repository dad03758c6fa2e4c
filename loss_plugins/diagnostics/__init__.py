"""Looking at a run from outside: memory."""
