"""A tiny config of any class: its own default one with small numbers in it, chosen by the names of the fields."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
VOCAB = 160
HEAD = 16
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
KEPT = ("id2label", "label2id", "transformers_version", "model_type", "architectures", "dtype", "_name_or_path")
TOKENS = re.compile(r"(token_id|token_index|_id)$")
LISTS: dict[str, list[Any]] = {
    "image_grid_pinpoints": [[32, 32]],
    "supported_aspect_ratios": [[1, 1]],
    "mlp_only_layers": [],
}
"""Lists that do not have an entry a layer."""


@functools.cache
def sizes() -> dict[str, int]:
    """Field name to number."""
    table: dict[int, list[str]] = yaml.safe_load((HERE / "sizes.yaml").read_text())
    return {name: size for size, names in table.items() for name in names}


@functools.cache
def exceptions() -> dict[str, dict[str, Any]]:
    """What the names of the fields cannot say, by class name: see the head of ``exceptions.yaml``."""
    found: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "exceptions.yaml").read_text()) or {}
    for entry in list(found.values()):
        for other in entry.pop("also", ()):
            found[other] = entry
    return found


def tiny_config(cls: Any) -> Any:
    """A config with which ``cls`` has two layers 64 wide and a vocabulary of `VOCAB`.

    Raises:
        Exception: whatever the config's own checks say, where neither names nor exceptions fit them.
    """
    entry = exceptions().get(cls.__name__, {})
    # a composite config may have no default: then it is put together from those of its parts
    start = {key: _config(value).to_dict() for key, value in entry.get("parts", {}).items()}
    start |= copy.deepcopy(entry.get("start", {}))
    given = cls.config_class(**start).to_dict()
    small = shrink(given)
    for path, value in entry.get("config", {}).items():
        _put(small, path, copy.deepcopy(value))
    config = _made(cls.config_class, small, strict="config" in entry)
    for name, value in entry.get("replace", {}).items():
        config.__dict__[name] = _config(**value)
    return config


def _made(config_class: Any, small: dict[str, Any], strict: bool) -> Any:
    try:
        return config_class.from_dict(copy.deepcopy(small))
    except Exception as error:
        if strict:
            raise
        # lists with an entry a layer do not fit two layers; most configs can make their own
        try:
            return config_class.from_dict(_without_lists(small))
        except Exception:
            raise error from None


def shrink(given: dict[str, Any]) -> dict[str, Any]:
    """``given``, a config as a dictionary, with small numbers."""
    small = {key: _shrunk(key, value, given) for key, value in given.items()}
    small.pop("per_layer_config", None)
    if isinstance(given.get("qk_rope_head_dim"), int) and isinstance(given.get("head_dim"), int):
        small["head_dim"] = small["qk_rope_head_dim"]
    if "mamba_d_conv" in given and "mamba_n_heads" in given:
        expand = given.get("mamba_expand", 2)
        small["mamba_n_heads"], small["mamba_d_head"] = 8, 16 if expand == 2 else 8
    if isinstance(given.get("rotary_dim"), int) and given["rotary_dim"]:
        small["rotary_dim"] = 8
    if given.get("use_cache") is True:
        small["use_cache"] = False
    layers = next((given[key] for key in LAYERS if isinstance(given.get(key), int)), 0)
    for key, value in small.items():
        if isinstance(value, list) and len(value) == layers > 2:
            kinds = [kind for i, kind in enumerate(value) if kind not in value[:i]]
            small[key] = (kinds + value)[: max(2, len(kinds))]
    return small


def _shrunk(key: Any, value: Any, given: dict[str, Any]) -> Any:
    if not isinstance(key, str) or key in KEPT:
        return value
    if key in ("rope_parameters", "rope_scaling"):
        return _rope(value)
    if key == "initializer_range" and isinstance(value, float) and value < 1e-6:
        return 0.02  # nothing would be seen of an image
    if isinstance(value, dict):
        return shrink(value)
    if isinstance(value, list) and key in LISTS:
        return copy.deepcopy(LISTS[key])
    number = isinstance(value, int) and not isinstance(value, bool)
    if number and key in sizes():
        if key in ("num_key_value_heads", "num_kv_heads"):
            heads = given.get("num_attention_heads", given.get("n_head", given.get("num_heads")))
            return 4 if heads == value else 2
        return sizes()[key]
    if key in ("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id"):
        return 1 if isinstance(value, list) or (number and value >= VOCAB) else value
    if number and TOKENS.search(key) and (value >= VOCAB - 20 or re.match("image|video|audio", key)):
        return VOCAB - 1 - sum(map(ord, key)) % 15
    return value


def _rope(value: Any) -> Any:
    """Rotary parameters for heads 16 wide."""
    if not isinstance(value, dict):
        return value
    small: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            small[key] = _rope(item)
        elif key == "mrope_section" and isinstance(item, list):
            half = int(HEAD * (value.get("partial_rotary_factor") or 1.0)) // 2
            each = max(1, half // len(item))
            small[key] = [each + half - each * len(item), *[each] * (len(item) - 1)]
        elif key in ("long_factor", "short_factor") and isinstance(item, list):
            small[key] = item[:8]
        elif key == "original_max_position_embeddings" and isinstance(item, int):
            small[key] = 64
        else:
            small[key] = item
    return small


def _without_lists(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    return {
        key: value if key == "rope_parameters" else _without_lists(value)
        for key, value in given.items()
        if not (isinstance(value, list) and re.search("layer|pattern|block", str(key)))
    }


def _config(model_type: str, **fields: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **fields)


def _put(config: dict[str, Any], path: str, value: Any) -> None:
    """Set ``a.b.c``. The value ``$delete`` takes the field away."""
    *parents, last = path.split(".")
    for key in parents:
        inner = config.get(key)
        inner = inner if isinstance(inner, dict) else {}
        config[key] = inner
        config = inner
    if value == "$delete":
        config.pop(last, None)
    else:
        config[last] = value
