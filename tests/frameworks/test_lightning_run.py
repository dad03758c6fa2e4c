"""The README's Lightning module, and the same trained with stock. Needs Lightning: `bash scripts/frameworks.sh lightning`
installs it and runs this.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from small_job import README, SMALLEST, assert_lower, command, needs

pytestmark = [pytest.mark.short, needs("lightning", "Lightning")]

COMPARED = """
import json

class Stock(Tuned):
    def __init__(self, model):
        lightning.LightningModule.__init__(self)
        self.model = model

    def on_train_end(self):
        pass


def watched(kind):
    class Watched(kind):
        losses = ()

        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            self.losses = (*self.losses, loss.item())
            return loss

    return Watched


out = {}
data = torch.randint(0, 1000, (20, 32), generator=torch.Generator().manual_seed(1))
for name, kind in (("stock", Stock), ("ours", Tuned), ("stock again", Stock)):
    torch.manual_seed(0)
    module = watched(kind)(LlamaForCausalLM(LlamaConfig(vocab_size=1000, **sizes)).train())
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2))
    handle = find_handle(module.model)
    out[name] = {"losses": module.losses, "keys": sorted(module.state_dict()), "fused": handle and handle.counts.fused}
    out[name]["materialised"] = handle and handle.counts.materialised
from loss_plugins.diagnostics.memory import PeakMeter

for name, kind in (("stock", Stock), ("ours", Tuned)):
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32768, **sizes)).train()
    module = kind(model)
    if name == "ours":
        find_handle(model).undo()
        patch_model(model, SMALLEST)
    with PeakMeter(torch.device("cpu")) as meter:
        meter.mark()
        module.log = lambda *_: None
        module.training_step(data[:4], 0).backward()
        out[name]["peak"] = meter.read() / 2**20
print(json.dumps(out))
"""


def test_the_readme_s_module_equals_stock(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python lightning\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "tuned.py").write_text(block + f"SMALLEST = {SMALLEST}\n" + COMPARED)
    code, output = command(tmp_path, "tuned.py")
    assert code == 0, output[-3000:]
    assert "'accuracy': " in output, "the README's own training printed its statistics"
    (line,) = [line for line in output.splitlines() if line.startswith('{"stock"')]
    runs: dict[str, dict[str, Any]] = json.loads(line)
    stock, ours = runs["stock"], runs["ours"]
    assert len(ours["losses"]) == 10
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-4)
    assert ours["keys"] == stock["keys"]
    assert (ours["fused"], ours["materialised"]) == (10, 0)
    assert stock["fused"] is None
    assert runs["stock again"]["losses"] == stock["losses"]
    assert_lower("lightning", ours["peak"], stock["peak"])
