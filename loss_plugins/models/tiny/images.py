"""Tiny batches with images in them, found by trying the few shapes that models take."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .inputs import FIRST, LAST, LENGTH, ROWS, made, tiny_inputs
from .shrink import VOCAB, exceptions

SIDE, PATCHES, MOST = 32, 4, 200
COUNTS = (4, 16, 1, 2, 5, 8, 9, 17, 32, 64)
"""Tokens an image that are tried where the class does not say how many it needs."""
TOKEN_KEYS = ("image_token_id", "image_token_index", "image_patch_id", "img_context_token_id")
PIXELS = ("pixel_values", "image_patches", "flattened_patches")
"""What the images themselves are called."""


def tiny_image_batches(model: Any, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Inputs with labels, other than those of `tiny_inputs`, by what is in them.

    ``text``: no image; ``images``: one in each row, before its text; ``mixed``: one in each row but the last. What was
    not found is missing. The tokens of an image have no labels.
    """
    accepted = inspect.signature(type(model).forward).parameters
    if "labels" not in accepted or not any(key in accepted for key in PIXELS):
        return {}
    training = model.training
    model.eval()
    try:
        base = tiny_inputs(model, seed=seed)
        if has_images(base):
            return _less_of(model, base, seed)
        return _more_than_text(model, accepted, seed)
    finally:
        model.train(training)


def has_images(inputs: dict[str, Any]) -> bool:
    """Whether there are images in a batch."""
    return any(key in inputs for key in PIXELS)


def _less_of(model: Any, base: dict[str, Any], seed: int) -> dict[str, dict[str, Any]]:
    """The batches with fewer images, where the class cannot do without, or has no tokens for them."""
    put = exceptions().get(type(model).__name__, {}).get("inputs", {}).get("input_ids", {})
    other = torch.randint(FIRST, LAST, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed + 1))

    def rows_of_text(first: int) -> dict[str, Any]:
        inputs = dict(base)
        if "put" in put:
            inputs["input_ids"] = base["input_ids"].clone()
            inputs["input_ids"][first:] = other[first:]
        return inputs

    fields = {key: base[key] for key in base if re.search("pixel|image|patches|qformer", key)}
    text = {key: value for key, value in rows_of_text(0).items() if key not in fields}
    mixed = _first_of(model, [rows_of_text(ROWS - 1) | some for some in _fewer(fields)])
    return {"text": text} | ({"mixed": mixed} if mixed else {})


def _more_than_text(model: Any, accepted: Any, seed: int) -> dict[str, dict[str, Any]]:
    entry = exceptions().get(type(model).__name__, {}).get("images", {})
    config = model.config
    token = entry.get("token", next((t for key in TOKEN_KEYS if isinstance(t := getattr(config, key, None), int)), -1))
    if not 0 <= token < VOCAB + 8:
        return {}
    for images in [_described(entry, ROWS)] if "fields" in entry else _images(model, accepted):
        counts, tried = [entry["count"]] if "count" in entry else _counts(model, images), [0]
        while counts:
            tried.append(counts.pop(0))
            count = tried[-1]
            inputs = _batch(accepted, images, token, [count] * ROWS, seed)
            wanted = _runs(model, inputs)
            if wanted is True:
                some = _fewer(images)
                if "fields" in entry:
                    some.insert(0, _described(entry, ROWS - 1))
                rows = [count] * (ROWS - 1) + [0]
                batches = [_batch(accepted, fewer, token, rows, seed) for fewer in some]
                mixed = _first_of(model, batches, entry.get("blank", False))
                return {"images": inputs} | ({"mixed": mixed} if mixed else {})
            if 0 < wanted <= MOST and wanted not in tried:
                counts.insert(0, wanted)
    return {}


def _fewer(images: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """``images`` without the last row's: left out, or nothing but zeros."""
    shares = {key: len(value) // ROWS * (ROWS - 1) for key, value in images.items()}
    left_out = {key: value[: shares[key]] for key, value in images.items()}
    blank = {key: torch.cat([left_out[key], 0 * value[shares[key] :]]) for key, value in images.items()}
    return [left_out, blank, left_out | {key: blank[key] for key in images if "mask" in key}]


def _first_of(model: Any, batches: list[dict[str, Any]], blank: bool = False) -> dict[str, Any] | None:
    """The first that runs, sees its images, and whose last row is text alone, or has the class's own blank image."""
    found = (inputs for inputs in batches if _runs(model, inputs) is True)
    return next((inputs for inputs in found if blank or _ends_in_text(model, inputs)), None)


def _ends_in_text(model: Any, inputs: dict[str, Any]) -> bool:
    """Whether the loss of the last row knows nothing of any image, also not of one put where its own is blank."""
    alone = inputs | {"labels": inputs["labels"].clone()}
    alone["labels"][:-1] = -100
    with torch.no_grad():
        loss = model(**alone)["loss"]
        try:
            other = model(**alone | _other_images(inputs))["loss"]
        except Exception:
            return True  # an image there is an image too many
    return torch.equal(loss, other)


def _described(entry: dict[str, Any], images: int) -> dict[str, Tensor]:
    """So many images by the class's rules."""
    generator = torch.Generator().manual_seed(1)
    sizes = {"I": images, "B": ROWS, "T": LENGTH + entry.get("count", 0)}
    return {key: made(rule, sizes, generator) for key, rule in entry["fields"].items()}


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


def _batch(accepted: Any, images: dict[str, Tensor], token: int, counts: list[int], seed: int) -> dict[str, Any]:
    """Rows that begin with so many tokens of an image, after their first token, and go on as text."""
    generator = torch.Generator().manual_seed(seed)
    length = LENGTH + max(counts)
    ids = torch.randint(FIRST, LAST, (ROWS, length), generator=generator)
    labels = torch.randint(FIRST, LAST, (ROWS, length), generator=generator)
    for row, count in enumerate(counts):
        ids[row, 1 : 1 + count] = token
        labels[row, : 1 + count] = -100
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
            other = model(**inputs | _other_images(inputs))["loss"]
    except Exception as error:
        features = re.search(r"do not match.*features:? (\d+)", str(error))
        return int(features[1]) // ROWS if features else False
    return bool(loss.isfinite()) and not torch.equal(loss, other)


def _other_images(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Other pixels, in the same range: also patches that begin with their row and column."""
    return {key: inputs[key].max() + inputs[key].min() - inputs[key] for key in PIXELS if key in inputs}
