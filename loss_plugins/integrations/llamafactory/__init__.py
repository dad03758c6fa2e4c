"""LLaMA-Factory: `loss_strategy` in its YAML, through `loss-plugins llamafactory train` or through a hook on its own
command. Its code is called unchanged."""
