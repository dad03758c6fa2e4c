"""A tiny batch with images in it, found by trying the few shapes that models take."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .inputs import FIRST, LAST, LENGTH, ROWS
from .shrink import VOCAB

SIDE, PATCHES, MOST = 32, 4, 200
COUNTS = (4, 16, 1, 2, 5, 8, 9, 17, 32, 64)
"""Tokens an image that are tried where the class does not say how many it needs."""


def tiny_image_inputs(model: Any, seed: int = 0) -> dict[str, Any] | None:
    """Inputs with labels, and an image in each row before its text; None if no such batch is found.

    The tokens of the image have no labels.
    """
    accepted = inspect.signature(type(model).forward).parameters
    token = next((t for t in (getattr(model.config, key, None) for key in TOKEN_KEYS) if isinstance(t, int)), None)
    if "pixel_values" not in accepted or "labels" not in accepted or token is None or not 0 <= token < VOCAB + 8:
        return None
    training = model.training
    model.eval()
    try:
        for images in _images(model, accepted):
            counts, tried = _counts(model, images), [0]
            while counts:
                tried.append(counts.pop(0))
                inputs = _batch(accepted, images, token, tried[-1], seed)
                wanted = _runs(model, inputs)
                if wanted is True:
                    return inputs
                if 0 < wanted <= MOST and wanted not in tried:
                    counts.insert(0, wanted)
    finally:
        model.train(training)
    return None


TOKEN_KEYS = ("image_token_id", "image_token_index", "image_patch_id")


def _images(model: Any, accepted: Any) -> Iterator[dict[str, Tensor]]:
    """Pixels and what describes them, in each of the forms that there are."""
    generator = torch.Generator().manual_seed(1)
    vision = getattr(model.config, "vision_config", None)
    patch = getattr(vision, "patch_size", 8)
    patch = patch if isinstance(patch, int) else 8
    pixels = torch.randn(ROWS, 3, SIDE, SIDE, generator=generator)
    flat = torch.randn(ROWS * PATCHES**2, 3 * 2 * patch * patch, generator=generator)
    grid = torch.tensor([[1, PATCHES, PATCHES]] * ROWS)
    described = {
        "image_sizes": torch.tensor([[SIDE, SIDE]] * ROWS),
        "aspect_ratio_ids": torch.ones(ROWS, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(ROWS, 1, 1, dtype=torch.long),
        "high_res_pixel_values": pixels,
        "tile_fine_mask": torch.ones(ROWS, 1, dtype=torch.bool),
        "image_merge_sizes": torch.full((ROWS,), 2),
        "num_local_patches": torch.zeros(ROWS, dtype=torch.long),
    }
    rest = {key: value for key, value in described.items() if key in accepted}
    if "image_grid_thw" in accepted:
        for values in (flat, flat[:, : flat.shape[1] // 2], flat[:, : 3 * patch * patch].view(-1, 3, patch, patch)):
            yield {"pixel_values": values, "image_grid_thw": grid, **rest}
        return
    if "spatial_shapes" in accepted:
        values = flat[:, : 3 * patch * patch].view(ROWS, PATCHES**2, -1)
        mask = torch.ones(ROWS, PATCHES**2, dtype=torch.long)
        yield {"pixel_values": values, "spatial_shapes": grid[:, 1:], "pixel_attention_mask": mask}
        return
    yield {"pixel_values": pixels, **rest}
    yield {"pixel_values": pixels[:, None], **rest}
    yield {"pixel_values": torch.stack([pixels, -pixels], 1), **rest}
    yield {"pixel_values": pixels[:, None, None], **rest}
    if rest:
        yield {"pixel_values": pixels}
    if "image_position_ids" in accepted:
        at = torch.cartesian_prod(torch.arange(PATCHES), torch.arange(PATCHES)).expand(ROWS, -1, -1)
        values = flat[:, : 3 * patch * patch].view(ROWS, PATCHES**2, -1)
        yield {"pixel_values": values, "image_position_ids": at}


def _counts(model: Any, images: dict[str, Tensor]) -> list[int]:
    """How many tokens an image has, by the class's own ``get_image_features`` if it answers."""
    ask = getattr(model, "get_image_features", None)
    if ask is None:
        return [*COUNTS]
    taken = inspect.signature(ask).parameters
    try:
        with torch.no_grad():
            found = ask(**{key: value for key, value in images.items() if key in taken})
    except Exception:
        return [*COUNTS]
    found = getattr(found, "pooler_output", None) if not isinstance(found, Tensor | list | tuple) else found
    parts = [found] if isinstance(found, Tensor) else [part for part in found or () if isinstance(part, Tensor)]
    rows = sum(part.numel() // part.shape[-1] for part in parts)
    return [rows // ROWS, *COUNTS] if rows and rows % ROWS == 0 else [*COUNTS]


def _batch(accepted: Any, images: dict[str, Tensor], token: int, count: int, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    length = LENGTH + count
    ids = torch.randint(FIRST, LAST, (ROWS, length), generator=generator)
    labels = torch.randint(FIRST, LAST, (ROWS, length), generator=generator)
    ids[:, 1 : 1 + count] = token
    labels[:, : 1 + count] = -100
    labels[-1, -2:] = -100
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, **images}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in accepted:
            inputs[name] = (ids == token).long()
    return {key: value for key, value in inputs.items() if key in accepted}


def _runs(model: Any, inputs: dict[str, Any]) -> bool | int:
    """Whether the forward runs, and sees the images; or how many tokens an image should have, if it says so."""
    try:
        with torch.no_grad():
            loss = model(**inputs)["loss"]
            other = model(**inputs | {"pixel_values": -inputs["pixel_values"]})["loss"]
    except Exception as error:
        features = re.search(r"do not match.*features:? (\d+)", str(error))
        return int(features[1]) // ROWS if features else False
    return bool(loss.isfinite()) and not torch.equal(loss, other)
