"""Tiny random models of every language model class that the installed transformers has, with batches for them.

They are made from a class's own default config by the names of its fields, so that a class that is new in a release can
be run on the day it appears.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from .classes import class_of_type, model_class, model_classes
from .images import has_images, tiny_image_batches
from .inputs import tiny_inputs
from .shrink import VOCAB, exceptions, tiny_config

__all__ = [
    "VOCAB",
    "class_of_type",
    "exceptions",
    "has_images",
    "model_class",
    "model_classes",
    "seed_everything",
    "tiny_config",
    "tiny_image_batches",
    "tiny_inputs",
    "tiny_model",
]

LARGEST = 30_000_000
"""Parameters; more than that is not tiny, and some field has been missed."""


def tiny_model(name: str, seed: int = 0) -> Any:
    """A model of the class ``name`` in float32 and training mode, with every parameter finite and random.

    Raises:
        Exception: whatever the config or the class says, for instance that a package is missing.
        ValueError: the model is not tiny.
    """
    cls = model_class(name)
    config = tiny_config(cls)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in cls(config).parameters())
    if size > LARGEST:
        raise ValueError(f"the shrunk {name} has {size} parameters: a field is missing in sizes.yaml")
    seed_everything(seed)
    model = cls(config)
    attention = exceptions().get(name, {}).get("attention")
    if attention:
        model.set_attn_implementation(attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.isfinite().all() or parameter.abs().max() > 1e4:
                parameter.normal_(std=0.02)  # never written by the class's own initialisation
            elif not parameter.any():
                parameter.normal_(std=0.1)  # a gate or a bias that starts closed
    return model.train()


def seed_everything(seed: int) -> None:
    """Some models draw from Python's and numpy's generators too."""
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy as np
    except ImportError:
        return
    np.random.seed(seed)
