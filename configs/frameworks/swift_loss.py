"""The loss of swift.yaml."""

from loss_plugins.integrations.swift import register

register({"loss_strategy": "cce", "loss_statistics": ["accuracy", "entropy"]})
