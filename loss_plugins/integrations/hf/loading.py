"""The model and tokenizer of ``loss-plugins train``: a local folder, a hub id, a GGUF file, or from scratch; LoRA."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ConfigError, MissingDependencyError, nearest, refuse, unknown_name
from .corpus import fingerprint, train_tokenizer
from .launch import tensor_parallel_size

logger = logging.getLogger(__name__)

DTYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16",
          "fp16": "float16"}  # fmt: skip


@dataclass
class ModelArguments:
    """Which model is trained, and which part of it."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A local folder, an id on the Hugging Face Hub, or a .gguf file."}
    )
    model_config: dict[str, Any] | None = field(
        default=None,
        metadata={
            "help": "In place of model_name_or_path, a new model with random weights: model_type and its settings, for "
            "example {model_type: llama, hidden_size: 128}."
        },
    )
    tokenizer_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Where it differs from model_name_or_path. Without either, a BPE is trained on the training text."
        },
    )
    tokenizer_vocab_size: int = field(
        default=32768, metadata={"help": "Entries of a tokenizer that is trained on the spot."}
    )
    dtype: str = field(default="float32", metadata={"help": "Type of the weights: float32, bfloat16 or float16."})
    attn_implementation: str | None = field(
        default=None,
        metadata={"help": "Attention of the model: sdpa, eager, flash_attention_2; default is the model's."},
    )
    lora_r: int | None = field(default=None, metadata={"help": "Rank of LoRA adapters; without it all weights train."})
    lora_alpha: float | None = field(default=None, metadata={"help": "Scale of LoRA; default twice the rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the adapters, in [0, 1)."})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Names of the layers to adapt, or all-linear; default is PEFT's for the model."}
    )

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    def _mistakes(self) -> Iterator[str]:
        if (self.model_name_or_path is None) == (self.model_config is None):
            yield (
                "Both model_name_or_path and model_config are set. Remove one, or set it to null."
                if self.model_config is not None
                else "There is no model: neither model_name_or_path nor model_config is set. Set one of them."
            )
        if self.dtype not in DTYPES:
            yield unknown_name("dtype", self.dtype, DTYPES)
        if self.lora_r is None:
            for key in ("lora_alpha", "lora_dropout", "lora_target_modules"):
                if getattr(self, key):
                    yield (
                        f"{key} is set to {getattr(self, key)!r}, but lora_r is not, and without it all weights train. "
                        "Set lora_r, for example to 8, or remove the key."
                    )
        elif self.lora_r < 1 or not 0 <= self.lora_dropout < 1:
            yield (
                f"lora_r must be at least 1 and lora_dropout in [0, 1), got {self.lora_r} and {self.lora_dropout}. Set "
                "lora_r to null for no LoRA."
            )


def load_config(args: ModelArguments) -> Any:
    """The model's configuration; weights are not read.

    Raises:
        ConfigError: it does not exist, or a setting of ``model_config`` is unknown or refused.
    """
    if args.model_config is not None:
        return _new_config(dict(args.model_config))
    from transformers import AutoConfig

    assert args.model_name_or_path is not None
    return _pretrained(AutoConfig.from_pretrained, "model_name_or_path", args.model_name_or_path)


def _new_config(settings: dict[str, Any]) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = settings.pop("model_type", None)
    if not isinstance(model_type, str):
        raise ConfigError(f"model_config needs a model_type, got {model_type!r}. Write for example model_type: llama.")
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        unknown = _short_unknown("model_type", model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        raise ConfigError(f"{unknown} It must be one of transformers' causal language models.")
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    settable = [key for key in default.to_dict() if not key.startswith("_")]
    kind = f"setting of model_config for {model_type!r}:"
    refuse(_short_unknown(kind, key, settable) for key in settings if not hasattr(default, key))
    try:
        return AutoConfig.for_model(model_type, **settings)
    except Exception as error:  # each family checks in its own way
        what = f"{config_class.__name__}: {one_line(error)}"
        raise ConfigError(f"model_config was refused by {what}. Correct it.") from error


def _short_unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """`unknown_name` without the list of what is known, for lists too long to read."""
    return unknown_name(kind, name, known).split(" Known: ")[0]


def one_line(error: BaseException, limit: int = 240) -> str:
    """An exception of another library as part of a sentence."""
    text = " ".join(str(error).split()).rstrip(".")
    return text if len(text) <= limit else text[: limit - 3].rpartition(" ")[0] + " ..."


def _pretrained(load: Any, key: str, name: str, **options: Any) -> Any:
    """``load`` with what stands behind ``name``.

    Raises:
        ConfigError: see `check_place`; or what the loader refused.
        MissingDependencyError: a GGUF file without the gguf package.
    """
    check_place(key, name)
    path = Path(name).expanduser()
    if path.is_file():
        source, options = str(path.parent), {**options, "gguf_file": path.name}
    elif path.is_dir():
        source = str(path)
    else:
        source, options = name, {**options, **_asked_of_hub(key, name)}
    try:
        return load(source, **options)
    except Exception as error:  # the loaders raise OSError, ValueError, KeyError and the hub's own kinds
        what = "could not be loaded" if path.exists() else "could not be loaded from the Hugging Face Hub"
        raise ConfigError(f"{key} {name!r} {what}: {one_line(error)}. {_advice(path, error)}") from error


def check_place(key: str, name: str) -> None:
    """What can be refused of a model's or a tokenizer's place without asking the Hub.

    Raises:
        ConfigError: a path that does not exist, or a file that is no GGUF.
        MissingDependencyError: a GGUF file without the gguf package.
    """
    if not name.strip():
        raise ConfigError(f"{key} is empty. Give a folder, a hub id or a .gguf file.")
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"{key} {name!r} is a file that is no .gguf. Give its folder, or a .gguf file.")
        try:
            import gguf  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError(
                f"{key} {name!r} is a GGUF file, and the package gguf is not installed. Run: pip install "
                "'loss-plugins[gguf]'"
            ) from error
    elif not path.is_dir() and _is_path(name):
        raise ConfigError(f"{key} {name!r} does not exist.{_near(path) or ' Check the path.'}")


def _advice(path: Path, error: Exception) -> str:
    """What to do about what a loader refused."""
    if "ignore_mismatched_sizes" in str(error):
        return "Its weights have other sizes than its config says: check that both are of the same model."
    if not path.exists():
        return "Check the name."
    if path.is_file():
        return "Check that the whole file was downloaded, and that this release of transformers knows its architecture."
    if not (path / "adapter_config.json").is_file() or (path / "config.json").is_file():
        return f"It has to be a folder that save_pretrained wrote, with all its files; it holds {_listed(path)}."
    try:
        base = json.loads((path / "adapter_config.json").read_text()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    named = f", {base!r}" if base else ""
    return f"It holds a PEFT adapter and no model: give the model that it was made for{named} (verify takes --adapter)."


def _listed(path: Path, limit: int = 6) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) + more) or "nothing"


def _is_path(name: str) -> bool:
    """Whether a name that stands for nothing here cannot be meant for the Hub, whose ids are ``owner/name``."""
    path = Path(name).expanduser()
    inside = "/" in name and path.parent.is_dir()
    return path.is_absolute() or name.startswith((".", "~")) or path.suffix == ".gguf" or name.count("/") > 1 or inside


def _near(path: Path) -> str:
    """`` Did you mean ...?`` from the folders and GGUF files beside a path."""
    if not path.parent.is_dir():
        return ""
    beside = [p.name for p in path.parent.iterdir() if p.suffix == ".gguf" or p.is_dir()]
    near = nearest(path.name, beside)
    return f" Did you mean {str(path.parent / near)!r}?" if near else ""


def _asked_of_hub(key: str, name: str) -> dict[str, Any]:
    """Ask once whether the Hub has ``name``, before loaders that try for half a minute; returns options for them.

    Raises:
        ConfigError: it has not, or it cannot be reached and nothing is cached.
    """
    import huggingface_hub
    from huggingface_hub import errors

    here = f"{key} {name!r} is no folder here and could not be had from the Hugging Face Hub"
    near = _near(Path(name))
    try:
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(name, "config.json"), timeout=5)
    except errors.HFValidationError as error:
        raise ConfigError(f"{here}: that is no id of a model.{near or ' Check the name.'}") from error
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{here}: its owner grants access. Ask for it on its page, then run hf auth login."
        ) from error
    except errors.RepositoryNotFoundError as error:
        what = "there is no such model, or it needs a login (hf auth login)"
        raise ConfigError(f"{here}: {what}.{near or ' Check the name.'}") from error
    except errors.HfHubHTTPError:
        pass  # a file is missing, or the Hub is busy: the loader knows more
    except Exception as error:  # each release has its own kinds for a network that is not there
        if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
            return {"local_files_only": True}
        advice = near or " Check the name and the network, or give the path of a local folder."
        raise ConfigError(f"{here}, which cannot be reached.{advice}") from error
    return {}


def load_tokenizer(args: ModelArguments, texts: Sequence[str], cache: Path) -> tuple[Any, str | None]:
    """The tokenizer, and its fingerprint where it was trained on ``texts``.

    A trained one is taken from ``cache`` where the same was kept there; `keep_tokenizer` keeps it. Nothing is written
    here.
    """
    name = args.tokenizer_name_or_path or args.model_name_or_path
    if name is not None:
        from transformers import AutoTokenizer

        key = "tokenizer_name_or_path" if args.tokenizer_name_or_path else "model_name_or_path"
        tokenizer, mark = _pretrained(AutoTokenizer.from_pretrained, key, name), None
    else:
        mark = fingerprint(texts, args.tokenizer_vocab_size)
        tokenizer = _kept(cache, mark)
        if tokenizer is None:
            tokenizer = train_tokenizer(texts, args.tokenizer_vocab_size)
            logger.info("Trained a tokenizer of %d entries on them.", len(tokenizer))
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ConfigError(f"The tokenizer of {name!r} has neither a padding nor an end token. Give one to it.")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, mark


def _kept(cache: Path, mark: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    try:
        if json.loads((cache / "trained_on.json").read_text())["fingerprint"] == mark:
            return PreTrainedTokenizerFast.from_pretrained(cache)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # none was kept, or it was cut off while being written: train again
    return None


def keep_tokenizer(tokenizer: Any, mark: str, cache: Path) -> None:
    """Write a trained tokenizer to ``cache``, its fingerprint last."""
    tokenizer.save_pretrained(cache)
    (cache / "trained_on.json").write_text(json.dumps({"fingerprint": mark}) + "\n")


def fit_config(config: Any, tokenizer: Any) -> None:
    """Make a new model's config fit its tokenizer: vocabulary large enough, and the special tokens.

    Raises:
        ConfigError: a vocabulary smaller than the tokenizer's.
    """
    text = config.get_text_config()
    if text.vocab_size < len(tokenizer):
        raise ConfigError(
            f"model_config.vocab_size is {text.vocab_size}, but the tokenizer has {len(tokenizer)} entries. Set it to "
            "at least that, or set a smaller tokenizer_vocab_size."
        )
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, key, getattr(tokenizer, key))


def load_model(args: ModelArguments, config: Any) -> Any:
    """A model ready to train, on the CPU: read from where the arguments say, or new; with LoRA where asked for."""
    import torch
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": getattr(torch, DTYPES[args.dtype])}
    if args.attn_implementation is not None:
        options["attn_implementation"] = args.attn_implementation
    options |= _in_parts(args)
    if args.model_name_or_path is not None:
        if args.model_name_or_path.endswith(".gguf"):
            options |= _plain_weights()
        load = AutoModelForCausalLM.from_pretrained
        model = _pretrained(load, "model_name_or_path", args.model_name_or_path, **options)
        if args.model_name_or_path.endswith(".gguf") and getattr(model, "hf_quantizer", None) is not None:
            model.hf_quantizer.remove_quantization_config(model)  # its weights are plain: they train and are saved
    else:
        try:
            model = AutoModelForCausalLM.from_config(config, **options)
        except (ValueError, TypeError, ImportError, RuntimeError) as error:
            raise ConfigError(
                f"model_config describes no model that can be built: {one_line(error)}. Correct it."
            ) from error
    return model if args.lora_r is None else _with_lora(model, args)


def _in_parts(args: ModelArguments) -> dict[str, Any]:
    """What asks for a model cut over several processes, where `accelerate launch` was told to (tensor parallelism)."""
    size = tensor_parallel_size()
    if size == 1:
        return {}
    if args.model_name_or_path is None or args.model_name_or_path.endswith(".gguf") or args.lora_r is not None:
        raise ConfigError(
            f"accelerate was told to cut the model over {size} processes (parallelism_config_tp_size), which is done "
            "while the weights of a saved model are read, and all of them are trained. Set model_name_or_path to a "
            "folder or a hub id with safetensors, without lora_r; or launch with configs/accelerate/fsdp2.yaml."
        )
    from transformers.distributed.configuration_utils import DistributedConfig

    if "tp_size" in inspect.signature(DistributedConfig).parameters:
        return {"distributed_config": DistributedConfig(tp_size=size)}
    return {"tp_plan": "auto"}  # older releases take all processes


def _plain_weights() -> dict[str, Any]:
    """What asks for a GGUF file's weights as plain ones. Releases without `GgufConfig` give nothing else."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def load_adapter(model: Any, folder: str) -> Any:
    """``model`` with a PEFT adapter that was saved before, ready to train on.

    Raises:
        ConfigError: there is none in that folder, or it is none for this model.
        MissingDependencyError: PEFT is not installed.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise MissingDependencyError(
            f"The adapter {folder!r} was asked for, and the package peft is not installed. Run: pip install "
            "'loss-plugins[peft]'"
        ) from error
    path = Path(folder).expanduser()
    if not (path / "adapter_config.json").is_file():
        raise ConfigError(f"The adapter {folder!r} is no folder with an adapter_config.json. Check the path.")
    try:
        return PeftModel.from_pretrained(model, str(path), is_trainable=True)
    except Exception as error:  # of each tuner's own kind
        raise ConfigError(
            f"The adapter {folder!r} could not be put on the model: {one_line(error)}. Give the model it was made for."
        ) from error


def _with_lora(model: Any, args: ModelArguments) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingDependencyError(
            f"lora_r {args.lora_r} was asked for, and the package peft is not installed. Run: pip install "
            "'loss-plugins[peft]'"
        ) from error
    targets, rank = args.lora_target_modules, int(args.lora_r or 0)
    settings: Any = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if args.lora_alpha is None else args.lora_alpha,  # type: ignore[arg-type] # floats work
        lora_dropout=args.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
    )
    try:
        adapted = get_peft_model(model, settings)
    except ValueError as error:
        raise ConfigError(
            f"lora_target_modules {targets!r} was refused by PEFT: {one_line(error)}. Correct it."
        ) from error
    if hasattr(adapted, "enable_input_require_grads"):
        adapted.enable_input_require_grads()  # gradient checkpointing needs a differentiable input
    return adapted
