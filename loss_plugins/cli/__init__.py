"""The command line: a file a command, heavy imports inside commands."""
