"""The loss of verl.yaml."""

from loss_plugins.integrations.verl import register

register("cce")
