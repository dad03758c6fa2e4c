"""What a training step draws from and may change, besides the parameters, so that it can be run again and undone."""

from __future__ import annotations

import random
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn


class Moment:
    """A model between two steps: random states, buffers, gradients. A context manager, at whose end all is as it was.

    Inside, the parameters have no gradient to begin with. `rewind` puts random states and buffers back, so that every
    run draws the same dropout.

    Args:
        model: The model, with wrappers if it has any.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = {key: p for key, p in model.named_parameters() if p.requires_grad}
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        tensors = (*model.parameters(), *(buffer for _, _, buffer, _ in self._buffers))
        devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
        self._device_states = {device: _device_module(device).get_rng_state(*_which(device)) for device in devices}
        self._state, self._python, self._numpy = torch.get_rng_state(), random.getstate(), _numpy_state()
        self._gradients = {key: p.grad for key, p in self.parameters.items()}

    def __enter__(self) -> Moment:
        self.forget_gradients()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.rewind()
        for key, parameter in self.parameters.items():
            parameter.grad = self._gradients[key]

    def rewind(self) -> None:
        """Random states and buffers as they were."""
        torch.set_rng_state(self._state)
        random.setstate(self._python)
        if self._numpy is not None:
            import numpy as np

            np.random.set_state(self._numpy)
        for device, state in self._device_states.items():
            _device_module(device).set_rng_state(state, *_which(device))
        with torch.no_grad():
            for module, name, buffer, value in self._buffers:
                module._buffers[name] = buffer
                buffer.copy_(value)

    def forget_gradients(self) -> None:
        """As the first step finds them."""
        for parameter in self.parameters.values():
            parameter.grad = None


def _device_module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _which(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # there is one


def _numpy_state() -> Any:
    try:
        import numpy as np
    except ImportError:
        return None
    return np.random.get_state()


def taken_gradients(parameters: dict[str, nn.Parameter], to_host: bool = False) -> dict[str, Tensor]:
    """The gradients that are there, taken away from their parameters; of sharded ones this process's part."""
    found = {}
    for key, parameter in parameters.items():
        if parameter.grad is not None:
            gradient = local(parameter.grad).detach()
            found[key] = gradient.cpu() if to_host else gradient
            parameter.grad = None
    return found


def loss_of(output: Any) -> Tensor:
    """The loss of an output in either form."""
    loss: Tensor = output["loss"] if isinstance(output, dict) else output[0]
    return loss


def local(tensor: Any) -> Tensor:
    """This process's part of a DTensor; anything else as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
