"""A job's settings: a flat YAML and ``--key value`` overrides, into the dataclasses that HfArgumentParser knows.

HfArgumentParser neither checks the types of values from YAML nor says which key was probably meant; this does, with one
sentence, before anything is built.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union

import yaml

from ..config import LossConfig
from ..errors import ConfigError, LossPluginError, nearest, refuse

NONE = type(None)
DEFAULTS = {"logging_steps": 0.05}
"""Where a job says nothing, other than the Trainer's: twenty points in a curve. Its 500 steps may be never."""
ALL_KEYS = "All keys: loss-plugins train --keys"


class _NoDuplicates(yaml.SafeLoader):
    """YAML keeps the last of two equal keys without a word; a job file with two is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, list | dict) and key in seen:
                twice = f"the key {key!r} stands twice"
                raise yaml.constructor.ConstructorError(None, None, twice, key_node.start_mark)
            seen.add(key if not isinstance(key, list | dict) else str(key))
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a job's YAML.

    Raises:
        ConfigError: no such file, no YAML, or no mapping of names.
    """
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        near = nearest(path.name, beside)
        hint = f" Did you mean {str(path.parent / near)!r}?" if near else " Check the path."
        raise ConfigError(f"The job file {str(path)!r} {'is a folder' if path.is_dir() else 'does not exist'}.{hint}")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_NoDuplicates)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}. Convert it to UTF-8.") from error
    except OSError as error:
        raise ConfigError(f"{path} could not be read: {error.strerror}. Check its permissions.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{path}{where} is not valid YAML: {what}. Write one key: value a line.") from error
    except ValueError as error:  # a date that is none
        raise ConfigError(f"{path} is not valid YAML: {error}. Put quotes around that value.") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        found = "nothing" if values is None else type(values).__name__
        raise ConfigError(f"{path} must hold key: value lines, and it holds {found}. {ALL_KEYS}")
    return values


def read_overrides(words: Sequence[str]) -> dict[str, list[str]]:
    """``--key value``, ``--key=value``, ``--key a b`` and ``--flag`` as key -> words.

    Raises:
        ConfigError: a word that belongs to no key, or a key given twice.
    """
    found: dict[str, list[str]] = {}
    key = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            head, dot, rest = name.partition(".")
            key = head.replace("-", "_") + dot + rest
            if key in found:
                raise ConfigError(f"--{key} was given twice. Give it once.")
            found[key] = [value] if equals else []
        elif not key:
            raise ConfigError(f"{word!r} belongs to no key. Overrides are written --key value, after the job file.")
        else:
            found[key].append(word)
    return found


def read_job(path: Path, words: Sequence[str], classes: Sequence[Any]) -> tuple[Any, ...]:
    """The dataclasses of a job: its YAML, with the command line's words over it.

    Raises:
        ConfigError: anything that is wrong with one of them; nothing was built or written.
    """
    hints = _hints(classes)
    values = read_values(path, classes)
    overrides = read_overrides(words)
    for key, given in overrides.items():
        head, dot, inner = key.partition(".")
        _check_known(head, given, hints, f"option '--{head}'")
        if dot:
            values[head] = _nested(values.get(head), head, inner, given)
        else:
            values[key] = _from_words(f"--{key}", given, hints[key])
    if "loss_strategy" in overrides and "strategies" not in overrides:
        values.pop("strategies", None)  # what is asked for on the command line stands over the file
    elif overrides.get("strategies") and "loss_strategy" not in overrides and values["strategies"] is not None:
        values.pop("loss_strategy", None)
    elif values.get("strategies") is not None and "loss_strategy" in values:
        refuse([both_set(values)])
    _log_often(values)
    return built(path, classes, values)


def both_set(values: Mapping[str, Any]) -> str:
    """What is wrong with a job of several strategies and of one."""
    both = f"strategies {values['strategies']!r} and loss_strategy {values['loss_strategy']!r}"
    return f"Both {both} are set. Remove one."


def built(path: Path, classes: Sequence[Any], values: Mapping[str, Any]) -> tuple[Any, ...]:
    """The dataclasses with values that are of their types.

    Raises:
        ConfigError: they refuse one.
    """
    from transformers import HfArgumentParser

    try:
        return HfArgumentParser(tuple(classes)).parse_dict(dict(values))
    except LossPluginError:
        raise
    except (ValueError, TypeError, RuntimeError, ImportError) as error:  # TrainingArguments' own checks
        text = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"{path} was refused by TrainingArguments: {text}. Correct the key that it names.") from error


def read_values(path: Path, classes: Sequence[Any]) -> dict[str, Any]:
    """A job file's values, each of a known key and of its type.

    Raises:
        ConfigError: one is not.
    """
    values, wrong = sorted_values(path, classes)
    refuse(wrong.values())
    return values


def sorted_values(path: Path, classes: Sequence[Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """A job file's values, each of a known key and of its type; and for each other key what is wrong.

    Raises:
        ConfigError: the file cannot be read.
    """
    hints = _hints(classes)
    values: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    for key, value in read_yaml(path).items():
        try:
            _check_known(key, value, hints, f"key {key!r} in {path}")
            values[key] = _checked(f"{key} in {path}", value, hints[key])
        except ConfigError as error:
            wrong[key] = str(error)
    return values, wrong


def _hints(classes: Sequence[Any]) -> dict[str, Any]:
    hints = {f.name: typing.get_type_hints(cls)[f.name] for cls in classes for f in fields(cls) if f.init}
    # as the config has them: for HfArgumentParser a mapping is also text there, and no bool
    return hints | {name: hint for name, hint in typing.get_type_hints(LossConfig).items() if name in hints}


def _log_often(values: dict[str, Any]) -> None:
    if not {"logging_steps", "logging_strategy"} & set(values):
        values |= DEFAULTS
        if values.get("eval_strategy") == "steps":
            values.setdefault("eval_steps", 500)  # would follow logging_steps


def _check_known(key: str, value: Any, known: Mapping[str, Any], what: str) -> None:
    if key in known:
        return
    from ..strategies import STRATEGIES

    owners = [name for name in STRATEGIES.builtin() if key in {f.name for f in fields(STRATEGIES.get(name).Options)}]
    if owners:
        if what.startswith("option"):
            how = f"--loss_options.{key} {' '.join(map(str, value)) or 'VALUE'}"
        else:
            how = f"loss_options: {{{key}: {value}}}"
        raise ConfigError(f"Unknown {what}. It is an option of loss_strategy {', '.join(owners)}: write {how}")
    ours = f"loss_{key.lower()}"
    near = ours if ours in known else nearest(key, known)
    raise ConfigError(f"Unknown {what}. {f'Did you mean {near!r}?' if near else ALL_KEYS}")


def _nested(held: Any, head: str, inner: str, given: Sequence[str]) -> dict[str, Any]:
    """A mapping with one entry replaced: ``--model_config.hidden_size 64``."""
    if held is not None and not isinstance(held, dict):
        raise ConfigError(f"--{head}.{inner} was given, but {head} is {held!r}, not a mapping. Set {head} as a whole.")
    if len(given) != 1:
        raise ConfigError(f"--{head}.{inner} needs one value, got {list(given)!r}. Write --{head}.{inner} VALUE.")
    copy = dict(held or {})
    place, *path = copy, *inner.split(".")
    for name in path[:-1]:
        place[name] = dict(place.get(name) or {})
        place = place[name]
    place[path[-1]] = _scalar(given[0])
    return copy


def _scalar(word: str) -> Any:
    """A word of the command line as YAML would read it; text where it would not."""
    try:
        value = yaml.safe_load(word)
    except yaml.YAMLError:
        return word
    if isinstance(value, str):
        for number in (int, float):  # YAML 1.1 reads 1e-3 as text
            try:
                return number(value)
            except ValueError:
                continue
    return value


def _from_words(what: str, words: Sequence[str], hint: Any) -> Any:
    """The value of an override: as YAML would read it where that fits, else as the text it is."""
    if not words:
        if bool in _members(hint):
            return True
        raise ConfigError(f"{what} needs a value. It must be {_described(hint)}.")
    readings: list[Any] = [[_scalar(w) for w in words], list(words)]
    if len(words) == 1:
        readings = [_scalar(words[0]), words[0], *readings]
    for reading in readings:
        try:
            return _fitted(reading, hint)
        except ValueError:
            continue
    return _checked(what, words[0] if len(words) == 1 else list(words), hint)


def _checked(what: str, value: Any, hint: Any) -> Any:
    try:
        return _fitted(value, hint)
    except ValueError as error:
        raise ConfigError(str(error).format(what=what)) from error


def _fitted(value: Any, hint: Any) -> Any:
    """``value`` as one of the types in ``hint``.

    Raises:
        ValueError: it is none of them; the message has ``{what}`` where the key belongs.
    """
    members = _members(hint)
    choices = [entry.value for m in members if isinstance(m, type) and issubclass(m, Enum) for entry in m]
    if value is False and "no" in choices:  # YAML reads a bare no as false
        return "no"
    if choices and isinstance(value, str) and str not in _strict(members) and value not in choices:
        near = nearest(value, choices)
        hinted = f" Did you mean {near!r}?" if near else ""
        raise ValueError(_literal("{what} must be one of ", f"{', '.join(choices)}, got {value!r}.{hinted}"))
    for reading in (value, [value]) if isinstance(value, str) else (value,):  # one word is a list of one
        for member in members:
            fits, result = _as_member(reading, member)
            if fits:
                return result
    raise ValueError(_literal("{what} must be ", f"{_described(hint)}, got {value!r}."))


def _literal(head: str, tail: str) -> str:
    return head + tail.replace("{", "{{").replace("}", "}}")


def _strict(members: Sequence[Any]) -> list[Any]:
    """Without the ``str`` that stands beside an enum only because its values are written as text."""
    return [m for m in members if m is not str or not any(isinstance(n, type) and issubclass(n, Enum) for n in members)]


def _members(hint: Any) -> list[Any]:
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return [member for part in typing.get_args(hint) for member in _members(part)]
    return [hint]


def _as_member(value: Any, member: Any) -> tuple[bool, Any]:
    """(whether ``value`` fits one plain type, the value in that type)."""
    origin = typing.get_origin(member)
    if member is Any:
        return True, value
    if origin is Literal:
        # False == 0, and only one of them was meant
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(member)), value
    if origin is list or member is list:
        return _as_list(value, member)
    if origin is dict or member is dict:
        return isinstance(value, dict), value
    if member is NONE:
        return value is None, None
    if member is bool:
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return True, value.lower() == "true"
        return isinstance(value, bool), value
    if member in (int, float) and not isinstance(value, bool):
        return _as_number(value, member)
    if isinstance(member, type) and issubclass(member, Enum):
        return isinstance(value, str) and value in [entry.value for entry in member], value
    return isinstance(member, type) and type(value) is member, value


def _as_list(value: Any, member: Any) -> tuple[bool, Any]:
    if not isinstance(value, list):
        return False, value
    (inner,) = typing.get_args(member) or (Any,)
    try:
        return True, [_fitted(entry, inner) for entry in value]
    except ValueError:
        return False, value


def _as_number(value: Any, kind: type) -> tuple[bool, Any]:
    """Numbers written as text too: YAML 1.1 reads 1e-3 as text."""
    if not isinstance(value, int | float | str):
        return False, value
    try:
        number = float(value)
    except ValueError:
        return False, value
    if kind is float:
        return True, number
    return number.is_integer(), int(number) if number.is_integer() else value


_WORDS = {
    int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a mapping", list: "a list",
    NONE: "null",
}  # fmt: skip
_PLURALS = {int: "whole numbers", float: "numbers", str: "names"}


def _described(hint: Any) -> str:
    """The types of a key in words: ``a whole number or null``."""
    members = _strict(_members(hint))
    words = []
    for member in members:
        origin = typing.get_origin(member) or member
        if origin is Literal:
            words += [repr(choice) for choice in typing.get_args(member)]
        elif isinstance(origin, type) and issubclass(origin, Enum):
            words.append(f"one of {', '.join(entry.value for entry in origin)}")
        elif origin is list and typing.get_args(member) and typing.get_args(member)[0] in _PLURALS:
            words.append(f"a list of {_PLURALS[typing.get_args(member)[0]]}")
        else:
            words.append(_WORDS.get(origin, getattr(origin, "__name__", str(origin))))
    return " or ".join(dict.fromkeys(words))
