"""Trains on the emulated NPU and on the CPU, and prints what came out, a line of JSON a case.

python npu_run.py torch|ascend FOLDER    # whose kernels compute: torch's, or triton-ascend's, compiled and run on this CPU
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import npu_device

if sys.argv[1] == "ascend":
    import ascend_driver

    ascend_driver.install(npu_device.CHIP)

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS.parent), str(TESTS), str(TESTS / "integrations"), str(TESTS / "cli")]

import npu_operators  # noqa: E402 - from here on what needs the device, or the folders above
import torch  # noqa: E402
import transformers  # noqa: E402

npu_operators.offer()  # before the device is looked at for the first time

from small_runs import arguments, llama, losses, norms, rows  # noqa: E402

from loss_plugins import LossPluginCallback, LossPluginTrainer, find_handle, linear_cross_entropy  # noqa: E402
from loss_plugins.device import DeviceProfile, free_bytes  # noqa: E402
from loss_plugins.diagnostics.environment import best_device  # noqa: E402
from loss_plugins.kernels import ops  # noqa: E402
from loss_plugins.strategies import Problem, select_on  # noqa: E402

STRATEGY_NAMES = ("naive", "chunked", "flce", "cce")
NPU = torch.device("npu", 0)
FOLDER = Path(sys.argv[2])


def say(case: str, **found: Any) -> None:
    print(json.dumps({"case": case, **found}), flush=True)


def facts() -> None:
    profile = DeviceProfile.probe(NPU)
    args = arguments(FOLDER, use_cpu=False)
    say(
        "facts",
        profile=asdict(profile),
        best=best_device(),
        free=free_bytes(NPU),
        trainer=str(args.device),
        torch_npu=transformers.utils.is_torch_npu_available(),
    )


def curves() -> None:
    """The same few steps by every strategy on the NPU, and by stock on the CPU."""

    def train(name: str, trainer: Any) -> None:
        ops.forget_launches()
        trainer.train()
        parameter = next(trainer.model.parameters())
        report = getattr(trainer, "loss_report", {})
        say(
            name,
            losses=losses(trainer),
            norms=norms(trainer),
            device=str(parameter.device),
            launched=sorted(ops.launched()),
            peak=report.get("loss_peak_bytes", 0),
            materialised=report.get("materialised", 0),
        )

    def plain(use_cpu: bool, callbacks: Any = None) -> Any:
        args = arguments(FOLDER, use_cpu=use_cpu)
        return transformers.Trainer(model=llama(), args=args, train_dataset=rows(), callbacks=callbacks)

    train("stock on the CPU", plain(use_cpu=True))
    train("stock", plain(use_cpu=False))
    for strategy in STRATEGY_NAMES:
        args = arguments(FOLDER, use_cpu=False, loss_strategy=strategy)
        train(strategy, LossPluginTrainer(model=llama(), args=args, train_dataset=rows()))
    train("callback", plain(use_cpu=False, callbacks=[LossPluginCallback("cce")]))


def settings() -> None:
    """What users set beside a strategy, each against the same on the CPU."""

    def train(use_cpu: bool, half: bool = False, **given: Any) -> Any:
        model = llama().to(torch.bfloat16) if half else llama()
        args = arguments(FOLDER, use_cpu=use_cpu, **{"loss_strategy": "cce", **given})
        trainer = LossPluginTrainer(model=model, args=args, train_dataset=rows(), eval_dataset=rows(8))
        trainer.train()
        ends = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        return losses(trainer) + ends, trainer.loss_report

    evaluated = {"eval_strategy": "steps", "eval_steps": 2}
    for name, given in (
        ("checked and evaluated", {**evaluated, "loss_self_check": True}),
        ("autocast", {"bf16": True}),
        ("half", {"half": True, "loss_strategy": "flce"}),
        ("native", {"half": True}),
    ):
        cpu, _ = train(True, **given)
        stock, _ = train(True, **given | {"loss_strategy": "naive"})
        options = {"loss_options": {"kernels": "native"}} if name == "native" else {}
        npu, report = train(False, **given, **options)
        say(f"settings, {name}", cpu=cpu, stock=stock, npu=npu, kernels=report["kernels"])


def job() -> None:
    """A YAML, unchanged but for `use_cpu`."""
    from tiny_job import Job

    for use_cpu in (True, False):
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            summary = Job(Path(folder)).done(loss_strategy="flce", use_cpu=use_cpu)
        say(f"job, use_cpu: {use_cpu}", device=summary["device"], **summary["strategies"]["flce"])


def memory() -> None:
    """One step over many tokens: what is allocated at the worst, above the inputs."""
    count, width, vocab, on_torch = 2048, 16, 32_768, sys.argv[1] == "torch"
    for dtype in (torch.float32, torch.bfloat16):
        # one core is no chip: a kernel of triton-ascend takes its time over so many logits
        names = STRATEGY_NAMES if on_torch else ("flce", "cce") if dtype == torch.bfloat16 else ()
        for strategy in names:
            hidden = torch.randn(count, width).to(NPU, dtype).requires_grad_()
            weight = torch.randn(vocab, width).to(NPU, dtype).requires_grad_()
            labels = torch.randint(0, vocab, (count,)).to(NPU)
            # torch's kernels hold copies of a tile, so there the limits are kept by asking for smaller ones
            options = {"flce": {"workspace_mb": 16}, "cce": {"workspace_mb": 2}}.get(strategy) if on_torch else None
            problem = Problem(count, width, vocab, dtype)
            plan = select_on(strategy, options, problem, NPU)
            promised = plan.strategy.peak_bytes(problem.on(DeviceProfile.probe(NPU)), plan.options)
            npu_device.memory.reset_peak()
            before = npu_device.memory.allocated()
            loss = linear_cross_entropy(hidden, weight, labels, strategy=strategy, options=options)
            loss.backward()
            peak = npu_device.memory.peak() - before
            kernels = plan.strategy.kernels(DeviceProfile.probe(NPU), plan.options)
            say(
                f"memory of {strategy} in {dtype}",
                peak=peak,
                promised=promised,
                logits=count * vocab * 4,
                kernels=kernels,
                loss=loss.item(),
            )
            del hidden, weight, labels, loss


def labels() -> None:
    """Ignored rows reach the kernels on a device, and a label out of range makes the loss NaN."""
    torch.manual_seed(1)
    hidden, weight = torch.randn(37, 24), torch.randn(200, 24)
    wanted = torch.randint(0, 200, (37,))
    wanted[::4] = -100
    for strategy in (*STRATEGY_NAMES, "native"):
        name, options = ("cce", {"kernels": "native"}) if strategy == "native" else (strategy, None)
        dtype = torch.bfloat16 if strategy == "native" else torch.float32
        found = {}
        for place in ("cpu", "npu"):
            h, w = (tensor.clone().to(place, dtype).requires_grad_() for tensor in (hidden, weight))
            given = options if place == "npu" else None
            loss = linear_cross_entropy(h, w, wanted.to(place), strategy=name, options=given)
            loss.backward()
            found[place] = (loss.detach().cpu(), h.grad.cpu().float(), w.grad.cpu().float())
        off = [float((a - b).abs().max()) for a, b in zip(*found.values(), strict=True)]
        broken = wanted.clone()
        broken[1] = 200
        bad = linear_cross_entropy(
            hidden.to(NPU, dtype), weight.to(NPU, dtype), broken.to(NPU), strategy=name, options=options
        )
        say(
            f"labels, {strategy}",
            off=off,
            ignored=float(found["npu"][1][::4].abs().max()),
            out_of_range=str(bad.item()),
        )


def wide() -> None:
    """Nothing of ours is computed in float64, with statistics and every addition to the loss."""
    before = set(npu_device.memory.doubles())
    for strategy in STRATEGY_NAMES:
        settings = {"loss_statistics": ["accuracy", "entropy"], "loss_label_smoothing": 0.1, "loss_z_loss": 1e-3}
        args = arguments(FOLDER, use_cpu=False, loss_strategy=strategy, max_steps=1, **settings)
        trainer = LossPluginTrainer(model=llama(), args=args, train_dataset=rows())
        trainer.train()
        logged = [entry for entry in trainer.state.log_history if "loss_plugins/entropy" in entry]
        say(f"wide, {strategy}", entropy=logged[0]["loss_plugins/entropy"])
    h, w = torch.randn(8, 16, device=NPU), torch.randn(50, 16, device=NPU)
    linear_cross_entropy(h, w, torch.arange(8).to(NPU), num_items_in_batch=5)
    say("wide", doubles=sorted(set(npu_device.memory.doubles()) - before))


def commands() -> None:
    """`doctor`, `plan` and `verify` on the device."""
    from typer.testing import CliRunner

    from loss_plugins.cli.main import app

    def run(*words: str) -> Any:
        done = CliRunner().invoke(app, [*words, "--json"])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, json.loads(done.stdout)

    code, found = run("doctor")
    say("doctor", code=code, device=found["device"], strategies=found["strategies"], findings=found["findings"])
    code, found = run("plan", "--rows", "8192", "--hidden", "1024", "--vocab", "151936")
    say("plan", code=code, chosen=found["chosen"], device=found["device"])
    code, found = run("verify", "tiny:llama", "--strategy", "flce", "--strategy", "cce", "--device", "npu")
    say("verify", code=code, **found)


def liger() -> None:
    """liger-kernel's other kernels beside ours: they run, or the reason is said."""
    from loss_plugins.errors import LossPluginError

    model = llama().to(NPU)
    try:
        trainer = LossPluginTrainer(
            model=model,
            args=arguments(FOLDER, use_cpu=False, loss_strategy="cce", liger_ops=True),
            train_dataset=rows(),
        )
        trainer.train()
        say("liger", losses=losses(trainer), touched=find_handle(trainer.model).explain())
    except LossPluginError as error:
        say("liger", refused=str(error))


CASES = (facts, curves, settings, job, memory, labels, wide, commands, liger)

if __name__ == "__main__":
    logging.disable(logging.INFO)
    asked = sys.argv[3:] or [case.__name__ for case in CASES]
    for case in CASES:
        if case.__name__ in asked:
            case()
