"""The prefix of the operators' names. A build for a kernel hub writes its own file here."""

NAMESPACE = "loss_plugins"
