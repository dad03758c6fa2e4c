"""verl's fused head on a real model, stock and with ours: its own patch of the model, and its own external_lib. Needs verl:
`bash scripts/frameworks.sh verl` installs it and runs this. No whole run of verl: its engines need Ray and a GPU.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from small_job import README, ROOT, needs, read_config
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from loss_plugins.diagnostics.memory import PeakMeter
from loss_plugins.errors import ConfigError, UnsupportedError
from loss_plugins.kernels import ops

pytestmark = [
    pytest.mark.short,
    needs("verl", "verl"),
    pytest.mark.filterwarnings("default"),  # ray's, tensordict's and verl's own
]

STEPS = 10
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def snippet(kind: str) -> str:
    (text,) = re.findall(rf"^```{kind}\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    return str(text)


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the README shows, imported as verl imports it."""
    from verl.utils.import_utils import import_external_libs

    keys = yaml.safe_load(snippet("yaml verl"))["actor_rollout_ref"]["model"]
    assert read_config("verl")["actor_rollout_ref"]["model"] == keys
    assert (ROOT / "configs" / "frameworks" / "verl_loss.py").read_text().endswith(snippet("python verl"))
    assert keys["use_fused_kernels"] is True
    assert keys["fused_kernel_options"] == {"impl_backend": "torch"}
    (tmp_path / f"{keys['external_lib']}.py").write_text(snippet("python verl"))
    monkeypatch.syspath_prepend(tmp_path)
    import_external_libs(keys["external_lib"])
    yield
    from loss_plugins.integrations.verl import unregister

    unregister()
    sys.modules.pop(keys["external_lib"], None)


def make_model(vocab: int = 320) -> Any:
    torch.manual_seed(0)

    class Model(LlamaForCausalLM):
        """verl changes the class: this one is dropped after the test."""

    Model.__name__ = "LlamaForCausalLM"
    model = Model(LlamaConfig(vocab_size=vocab, max_position_embeddings=64, **SIZES, **HEADS)).train()
    from verl.models.transformers.monkey_patch import patch_forward_with_backends

    patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="torch")
    return model


def trained(model: Any) -> tuple[list[float], list[Tensor]]:
    """Ten steps of a policy's objective: each token's advantage times how much likelier it has become."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    torch.manual_seed(1)
    ids, advantages = torch.randint(0, 320, (4, 24)), torch.randn(4, 24)
    before = model(input_ids=ids, temperature=0.7, return_dict=True).log_probs.detach()
    losses, entropies = [], []
    for _ in range(STEPS):
        output = model(input_ids=ids, temperature=0.7, return_dict=True)
        loss = -(advantages * (output.log_probs - before).exp()).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        entropies.append(output.entropy.detach())
    return losses, entropies


def test_as_stock(request: pytest.FixtureRequest) -> None:
    stock = trained(make_model())
    request.getfixturevalue("registered")
    ops.forget_launches()
    ours = trained(make_model())
    assert {entry.rpartition(".")[2] for entry in ops.launched()} == {"linear_ce_forward", "linear_ce_backward"}
    assert ours[0] == pytest.approx(stock[0], rel=1e-4)
    assert stock[0][-1] < stock[0][0]
    for mine, theirs in zip(ours[1], stock[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_memory_is_lower(request: pytest.FixtureRequest) -> None:
    def peak() -> int:
        model, ids = make_model(20_000), torch.randint(0, 20_000, (2, 512))
        with PeakMeter(torch.device("cpu")) as meter:
            meter.mark()
            model(input_ids=ids, return_dict=True).log_probs.sum().backward()
            return meter.read()

    stock = peak()
    request.getfixturevalue("registered")
    ours = peak()
    print(
        f"verl: log-probabilities of 20000 classes and their backward take {stock / 2**20:.1f} MiB stock, "
        f"{ours / 2**20:.1f} MiB ours"
    )
    assert ours < 0.8 * stock


@pytest.mark.usefixtures("registered")
def test_a_gradient_of_the_entropy_is_refused() -> None:
    output = make_model()(input_ids=torch.randint(0, 320, (2, 9)), return_dict=True)
    with pytest.raises(UnsupportedError, match="entropy_coeff is not 0"):
        (output.log_probs.mean() - 0.01 * output.entropy.mean()).backward()


def test_registering_twice_and_taking_back() -> None:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    from loss_plugins.integrations.verl import register, unregister

    before = copy.copy(dict(vars(FusedLinearForPPO)))
    register("cce")
    register("chunked")
    unregister()
    unregister()
    assert dict(vars(FusedLinearForPPO)) == before


@pytest.mark.parametrize(
    ("config", "words"),
    [("ccee", "Did you mean 'cce'"), ({"loss_strategy": "cce", "loss_z_loss": 0.1}, "Leave loss_z_loss out")],
)
def test_bad_settings(config: Any, words: str) -> None:
    from loss_plugins.integrations.verl import register

    with pytest.raises(ConfigError, match=words):
        register(config)
