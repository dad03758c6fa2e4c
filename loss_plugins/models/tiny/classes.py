"""Which classes the installed transformers has for language models, by its own auto mappings."""

from __future__ import annotations

import functools
import importlib
from typing import Any

MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}


@functools.cache
def model_classes(*kinds: str) -> dict[str, tuple[str, ...]]:
    """Names of the classes of these mappings (default: all), each with its model types."""
    from transformers.models.auto import modeling_auto

    found: dict[str, list[str]] = {}
    for kind in kinds or MAPPINGS:
        for model_type, names in getattr(modeling_auto, MAPPINGS[kind]).items():
            for name in (names,) if isinstance(names, str) else names:
                types = found.setdefault(name, [])
                if model_type not in types:
                    types.append(model_type)
    return {name: tuple(found[name]) for name in sorted(found)}


def model_class(name: str) -> Any:
    """The class of that name, imported."""
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    if not hasattr(transformers, name):
        for kind in MAPPINGS:
            for model_type in model_classes(kind).get(name, ()):
                module = importlib.import_module(f"transformers.models.{model_type_to_module_name(model_type)}")
                if hasattr(module, name):
                    return getattr(module, name)
    return getattr(transformers, name)


def class_of_type(model_type: str) -> str | None:
    """The class for a config's ``model_type``, the one that generates text where there are several."""
    for kind in ("causal", "seq2seq", "image-text"):
        for name, types in model_classes(kind).items():
            if model_type in types:
                return name
    return None
