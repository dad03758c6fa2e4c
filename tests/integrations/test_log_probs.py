"""TRL's preference and policy trainers, stock and with log-probabilities from a strategy, under the TRL that is
installed: logits that leave the forward until 1.14, TRL's fused head from 1.15 on."""

from __future__ import annotations

import copy
import re
import warnings
from importlib import import_module
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

trl = pytest.importorskip("trl", reason="trl is not installed: pip install trl")
datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install datasets")

from loss_plugins import LossConfig, LossPluginTrainer, find_handle  # noqa: E402
from loss_plugins.diagnostics.memory import PeakMeter  # noqa: E402
from loss_plugins.errors import ConfigError, UnsupportedError  # noqa: E402
from loss_plugins.integrations.hf import serve_trainer  # noqa: E402
from loss_plugins.integrations.hf.corpus import train_tokenizer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # trl's, peft's and datasets' own

LINES = [
    "a rose is a rose is a rose, and a rose by any name",
    "the cat sat on the mat while the rat ran round the hat",
    "water, water, everywhere, and all the boards did shrink",
    "tiger tiger burning bright in the forests of the night",
]
STEPS = 10
WIDE = 32768
"""Classes of a model whose logits are most of what a training step takes."""
TOKENIZER = train_tokenizer(LINES * 4, 300)
TOKENIZER.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def save_model(folder: Path, vocab: int) -> Path:
    """A model on disk, from which trainers make references."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    special = {"pad_token_id": TOKENIZER.pad_token_id, "eos_token_id": TOKENIZER.eos_token_id, "bos_token_id": None}
    LlamaForCausalLM(LlamaConfig(vocab_size=vocab, **sizes, **heads, **special)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), 320)


def find(name: str) -> tuple[Any, Any]:
    """A trainer's class and its config's, wherever this TRL keeps it."""
    for place in ("trl", f"trl.experimental.{name.lower()}"):
        try:
            module = import_module(place)
            return getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")
        except (ImportError, AttributeError):
            continue
    pytest.skip(f"this trl ({trl.__version__}) has no {name}Trainer")
    raise AssertionError


def data(name: str) -> Any:
    if name == "SFT":
        rows = [{"prompt": LINES[i % 4][:12], "completion": LINES[(i + 1) % 4][: 20 + i]} for i in range(24)]
    elif name == "KTO":
        rows = [{"prompt": LINES[i % 4][:12], "completion": LINES[(i + 1) % 4], "label": i % 2 == 0} for i in range(24)]
    elif name in ("GRPO", "RLOO"):
        rows = [{"prompt": LINES[i % 4][: 8 + i]} for i in range(24)]
    else:
        rows = [
            {"prompt": LINES[i % 4][:12], "chosen": LINES[(i + 1) % 4], "rejected": LINES[(i + 2) % 4][: 20 + i]}
            for i in range(24)
        ]
    return datasets.Dataset.from_list(rows)


def more(name: str) -> dict[str, Any]:
    if name in ("GRPO", "RLOO"):
        # a penalty for leaving the reference makes the run depend on its log-probabilities
        return {"max_completion_length": 12, "num_generations": 2, "beta": 0.1, "temperature": 0.7}
    return {"max_length": 48}


def reward(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(str(text)) % 5) for text in completions]


def build(name: str, folder: Path, **keys: Any) -> Any:
    trainer_class, config_class = find(name)
    peft = keys.pop("peft_config", None)
    settings = {
        "output_dir": str(folder / "out"), "max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 1,
        "learning_rate": 2e-3, "lr_scheduler_type": "constant", "use_cpu": True, "report_to": "none", "seed": 7,
        "save_strategy": "no", "bf16": False, "disable_tqdm": True, "gradient_checkpointing": False,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = config_class(**{**settings, **more(name), **keys})
        given = {"reward_funcs": reward} if name in ("GRPO", "RLOO") else {}
        return trainer_class(
            model=LlamaForCausalLM.from_pretrained(folder), args=args, train_dataset=data(name),
            processing_class=TOKENIZER, peft_config=peft, **given,
        )  # fmt: skip


def history(trainer: Any) -> list[dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


SPEED = ("tokens_per", "time", "num_tokens", "epoch", "loss_plugins/")


def assert_same(ours: list[dict[str, Any]], stock: list[dict[str, Any]]) -> None:
    """All that is logged, and not the loss alone: rewards, log-probabilities, entropies, mean logits, accuracies."""
    assert len(ours) == len(stock) == STEPS
    for mine, theirs in zip(ours, stock, strict=True):
        for key, value in theirs.items():
            if not any(word in key for word in SPEED):
                rel = 1e-3 if key == "grad_norm" else 1e-4
                # what is not the loss may be a difference of sums of some -100, whose last place is 1e-5 in float32
                least = 1e-6 if key == "loss" else 1e-4
                assert mine[key] == pytest.approx(value, rel=rel, abs=least), (key, mine["step"])


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("SFT", {"loss_type": "nll"}),
        ("SFT", {"loss_type": "dft"}),
        ("DPO", {}),
        ("DPO", {"loss_type": "ipo"}),
        ("DPO", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
        ("KTO", {}),
        ("ORPO", {}),
        ("CPO", {}),
        ("GRPO", {}),
        ("RLOO", {}),
    ],
    ids=["sft", "dft", "dpo", "ipo", "dpo-sft", "kto", "orpo", "cpo", "grpo", "rloo"],
)
def test_as_stock(name: str, keys: dict[str, Any], saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    stock = history(build(name, saved, **keys))
    trainer = build(name, saved, **keys)
    served = serve_trainer(trainer, "cce")
    ours = history(trainer)
    assert_same(ours, stock)
    assert any(entry["loss"] != 0 for entry in stock)
    assert any(entry["grad_norm"] > 0 for entry in stock)
    assert len(served.handles) == (1 if name in ("SFT", "ORPO", "CPO") else 2)
    assert all(handle.counts.fused >= STEPS for handle in served.handles)
    assert all(handle.counts.materialised == 0 for handle in served.handles), served.handles[0].materialised_by
    assert "NO LOSS WENT THROUGH" not in caplog.text
    assert "has replaced the forward" not in caplog.text


@pytest.mark.parametrize("name", ["DPO", "KTO", "GRPO"])
def test_mixed_precision(name: str, saved: Path) -> None:
    """accelerate puts forwards of its own on both models then, around TRL's or ours."""
    stock = history(build(name, saved, bf16=True, max_steps=3))
    trainer = build(name, saved, bf16=True, max_steps=3)
    served = serve_trainer(trainer, "cce")
    ours = history(trainer)
    assert len(ours) == len(stock) == 3
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=2e-2, abs=2e-2)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.1)
    assert len(served.handles) == 2
    assert all(handle.counts.fused >= 3 and handle.counts.materialised == 0 for handle in served.handles)


@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO"])
def test_memory_is_lower(name: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "wide", WIDE)
    keys = {"loss_type": "nll"} if name == "SFT" else {}

    def peak(config: LossConfig | None) -> float:
        trainer = build(name, folder, max_steps=1, **keys)
        if config is not None:
            serve_trainer(trainer, config)
        step = trainer.training_step
        meter = PeakMeter(torch.device("cpu"))

        def watched(*args: Any, **kwargs: Any) -> Any:
            with meter:
                meter.mark()
                return step(*args, **kwargs)

        trainer.training_step = watched
        history(trainer)
        return meter.read() / 2**20

    stock, ours = peak(None), peak(LossConfig("cce", {"workspace_mb": 1}))
    print(
        f"trl {trl.__version__} {name}: a training step of {WIDE} classes takes {stock:.1f} MiB stock, {ours:.1f} ours"
    )
    assert ours < 0.8 * stock


def test_lora_with_its_base_as_reference(saved: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    keys = {"peft_config": peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")}
    runs = []
    for strategy in (None, "chunked"):
        torch.manual_seed(3)  # the adapter's first weights
        trainer = build("DPO", saved, **copy.deepcopy(keys))
        if strategy is not None:
            served = serve_trainer(trainer, strategy)
        runs.append(history(trainer))
    assert_same(runs[1], runs[0])
    assert [handle.counts.materialised for handle in served.handles] == [0]
    assert served.handles[0].counts.fused >= 2 * STEPS


def test_the_readme_s_lines(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = Path(__file__).parents[2] / "loss_plugins" / "integrations" / "README.md"
    (code,) = re.findall(r"^```python trl\n(.*?)^```", readme.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"dataset": data("DPO"), "folder": str(saved), "tokenizer": TOKENIZER}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(code, str(readme), "exec"), names)
    assert names["served"].handles[0].counts.fused > 0
    assert names["trainer"].state.global_step == 2


def test_undo_leaves_nothing(saved: Path) -> None:
    trainer = build("DPO", saved)
    models = [trainer.model, trainer.ref_model]
    modules = [import_module(cls.__module__) for cls in type(trainer).__mro__ if cls.__module__.startswith("trl.")]
    before = [dict(vars(trainer)), *(dict(vars(model)) for model in models), *(dict(vars(m)) for m in modules)]
    classes = [(type(model), type(model.lm_head)) for model in models]
    callbacks = list(trainer.callback_handler.callbacks)
    served = serve_trainer(trainer, "cce")
    assert find_handle(models[0]) is served.handles[0]
    served.undo()
    served.undo()
    after = [dict(vars(trainer)), *(dict(vars(model)) for model in models), *(dict(vars(m)) for m in modules)]
    assert [(type(model), type(model.lm_head)) for model in models] == classes
    for one, other in zip(before, after, strict=True):
        assert one.keys() == other.keys()
        assert all(one[key] is other[key] for key in one if key not in ("_forward", "forward"))
    for model, there in zip(models, before[1:3], strict=True):
        assert model.__dict__.get("forward") == there.get("forward")
    assert trainer.callback_handler.callbacks == callbacks
    losses = [[entry["loss"] for entry in history(each)] for each in (trainer, build("DPO", saved))]
    assert losses[0] == losses[1]
    assert find_handle(models[0]) is None


def test_generation_is_stock(saved: Path) -> None:
    trainer = build("DPO", saved)
    ids = TOKENIZER(LINES[0], return_tensors="pt").input_ids
    expected = trainer.model.generate(ids, max_new_tokens=6, do_sample=False)
    serve_trainer(trainer, "cce")
    assert torch.equal(trainer.model.generate(ids, max_new_tokens=6, do_sample=False), expected)
    assert isinstance(trainer.model(input_ids=ids).logits, torch.Tensor)


def test_evaluation_is_stock(saved: Path) -> None:
    losses = []
    for strategy in (None, "cce"):
        trainer = build("DPO", saved)
        served = None if strategy is None else serve_trainer(trainer, strategy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses.append(trainer.evaluate(trainer.train_dataset)["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert served is not None
    assert all(handle.counts.fused > 0 and handle.counts.materialised == 0 for handle in served.handles)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LossConfig("cce", loss_label_smoothing=0.1), "loss_label_smoothing is 0.1, but DPOTrainer computes its own"),
        (LossConfig("cce", loss_z_loss=1e-4), "Leave loss_z_loss out"),
        (LossConfig("cce", loss_statistics=["accuracy"]), "Leave loss_statistics out"),
    ],
)
def test_what_cannot_be_added(config: LossConfig, words: str, saved: Path) -> None:
    trainer = build("DPO", saved)
    with pytest.raises(ConfigError, match=words):
        serve_trainer(trainer, config)
    assert find_handle(trainer.model) is None


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"torch_compile": True}, "torch_compile is on"),
        ({"_n_gpu": 2}, "nn.DataParallel"),
        ({"use_liger_kernel": True}, "use_liger_kernel is on, with which DPOTrainer"),
    ],
)
def test_what_it_is_not_combined_with(setting: dict[str, Any], words: str, saved: Path) -> None:
    trainer = build("DPO", saved)
    for key, value in setting.items():
        setattr(trainer.args, key, value)
    with pytest.raises(UnsupportedError, match=words):
        serve_trainer(trainer, "cce")
    assert find_handle(trainer.model) is None


def test_a_chunked_loss_of_trl_s_own_is_refused(saved: Path) -> None:
    """As TRL <= 1.14 puts it on the model where no loss_type is given."""
    trainer = build("SFT", saved, loss_type="nll")
    trainer.model.__dict__.pop("forward", None)
    code = (lambda self, **kwargs: None).__code__
    trainer.model.forward = MethodType(FunctionType(code, {"__name__": "trl.trainer.sft_trainer"}), trainer.model)
    with pytest.raises(UnsupportedError, match="Set loss_type: nll"):
        serve_trainer(trainer, "cce")


def test_trainers_that_take_more_are_refused(saved: Path) -> None:
    from transformers import Trainer, TrainingArguments

    class GKDTrainer(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    trainer = GKDTrainer(
        LlamaForCausalLM.from_pretrained(saved), TrainingArguments(str(saved), use_cpu=True, report_to="none")
    )
    with pytest.raises(UnsupportedError, match="GKDTrainer, which takes more from the model than log-probabilities"):
        serve_trainer(trainer, "cce")


@pytest.mark.parametrize("config", ["cce", {"loss_strategy": "cce", "loss_objective": "dft"}])
def test_trainers_that_take_the_models_loss_have_another_way(saved: Path, config: Any) -> None:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

    class MyTrainer(Trainer):
        pass

    args = Seq2SeqTrainingArguments(str(saved), use_cpu=True, report_to="none")
    model = LlamaForCausalLM.from_pretrained(saved)
    for kind in (Trainer, Seq2SeqTrainer, MyTrainer):
        words = (
            rf"{kind.__name__}, which takes the loss from the model, .*Use LossPluginTrainer\(..., loss_config='cce'\)"
            rf" .*{kind.__name__}\(..., callbacks=\[LossPluginCallback\('cce'\)\]\)"
        )
        with pytest.raises(UnsupportedError, match=words):
            serve_trainer(kind(model, args), config)
    assert find_handle(model) is None
    trainer = LossPluginTrainer(model, args, loss_config="naive")
    with pytest.raises(
        UnsupportedError, match=r"loss comes from loss_plugins already.* LossPluginTrainer\(..., loss_c"
    ):
        serve_trainer(trainer, config)


def test_dft_is_trl_s_own(saved: Path) -> None:
    trainer = build("SFT", saved, loss_type="nll")
    with pytest.raises(ConfigError, match=r'Build it with SFTConfig\(loss_type="dft"\), and leave loss_objective out'):
        serve_trainer(trainer, {"loss_objective": "dft"})
    with pytest.raises(ConfigError, match="loss_objective is 'dft', but DPOTrainer computes its own objective"):
        serve_trainer(build("DPO", saved), {"loss_objective": "dft"})


def test_what_is_no_trainer(saved: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(saved)
    with pytest.raises(
        ConfigError, match=r"was given a model, LlamaForCausalLM. Write loss_plugins.patch_model\(model"
    ):
        serve_trainer(model, "cce")
    with pytest.raises(ConfigError, match=r"was given the class SFTTrainer\. Build the trainer"):
        serve_trainer(trl.SFTTrainer, "cce")
    with pytest.raises(ConfigError, match="was given NoneType without model and callbacks"):
        serve_trainer(None, "cce")
