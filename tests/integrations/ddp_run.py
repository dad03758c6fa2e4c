"""One rank of a two-process training; `test_distributed.py` launches it and reads what rank 0 writes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from small_runs import arguments, llama, losses, norms, rows
from transformers import Trainer

from loss_plugins import LossPluginTrainer
from loss_plugins.testing import leave_group


def masked_on_rank_1(features: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = {key: torch.stack([feature[key] for feature in features]) for key in features[0]}
    if os.environ["RANK"] == "1":
        batch["labels"] = torch.full_like(batch["labels"], -100)
    return batch


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    settings = {"per_device_train_batch_size": 2, "ddp_backend": "gloo"}
    result = {}
    for name, make, extra in (
        ("stock", Trainer, {}),
        ("cce", LossPluginTrainer, {"loss_strategy": "cce", "loss_statistics": ["accuracy", "entropy"]}),
        ("chunked", LossPluginTrainer, {"loss_strategy": "chunked"}),
        ("smoothed", Trainer, {"label_smoothing_factor": 0.1}),
        ("flce smoothed", LossPluginTrainer, {"loss_strategy": "flce", "label_smoothing_factor": 0.1}),
    ):
        trainer = make(
            llama(), arguments(folder, **settings, **extra), train_dataset=rows(), eval_dataset=rows(7, seed=9)
        )
        trainer.train()
        metrics = trainer.evaluate()
        result[name] = {"losses": losses(trainer), "norms": norms(trainer), "metrics": metrics}
        result[name]["logs"] = trainer.state.log_history[:4]
    # a rank whose batches have no token to learn must neither hang nor change the others' gradients
    trainer = LossPluginTrainer(
        llama(),
        arguments(folder, **settings, loss_strategy="cce"),
        train_dataset=rows(),
        data_collator=masked_on_rank_1,
    )
    trainer.train()
    result["masked"] = {"losses": losses(trainer)}
    head = trainer.model.lm_head.weight.detach().clone()
    other = head.clone()
    torch.distributed.broadcast(other, 0)
    result["masked"]["equal"] = torch.tensor(float(torch.equal(head, other)))
    torch.distributed.all_reduce(result["masked"]["equal"], torch.distributed.ReduceOp.MIN)
    result["masked"]["equal"] = result["masked"]["equal"].item()
    if trainer.is_world_process_zero():
        (folder / "result.json").write_text(json.dumps(result))
    leave_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
