"""How a model's own forward meets a strategy: deferred logits, head access, and the patch that puts them in place."""
