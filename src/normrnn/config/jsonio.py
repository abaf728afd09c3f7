"""Configs as JSON and back, and the fields in which two differ."""

import dataclasses
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from normrnn.errors import UsageError, UserError

T = TypeVar("T")
_LARGEST = 2**63


to_dict = dataclasses.asdict
"""Return nested plain values, ready for JSON."""


def from_dict(kind: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Return the config of these values. A missing field takes its default.

    >>> from normrnn.text.config import TextConfig
    >>> from_dict(TextConfig, {"level": "char"})
    TextConfig(level='char', max_vocab=0, unknown=True)
    """
    if not isinstance(values, Mapping):
        raise _wrong(prefix.rstrip(".") or "config", values, "an object")
    hints = get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(values.keys() - fields.keys()):
        raise UserError(f"config has an unknown field {prefix}{unknown[0]}")
    for name, spec in fields.items():
        has_default = (spec.default, spec.default_factory) != (dataclasses.MISSING,) * 2
        if name not in values and not has_default:
            raise UserError(f"config lacks the field {prefix}{name}")
    return kind(**{n: _value(hints[n], v, f"{prefix}{n}") for n, v in values.items()})


def _value(kind: Any, value: Any, name: str) -> Any:
    """Return a value of this type; UserError for any other."""
    origin, choices = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return from_dict(kind, value, f"{name}.")
    if origin is Literal:
        if value not in choices:
            raise _wrong(name, value, f"one of {', '.join(map(str, choices))}")
        return value
    if origin is list and isinstance(value, list):
        return [_value(choices[0], one, name) for one in value]
    allowed = choices if origin in (Union, types.UnionType) else (origin or kind,)
    if type(value) is int and abs(value) > _LARGEST:
        raise UserError(f"config field {name} is a number of {len(str(value))} digits")
    if float in allowed and type(value) is int:
        return float(value)
    if type(value) not in allowed:
        expected = " or ".join(getattr(a, "__name__", str(a)) for a in allowed)
        raise _wrong(name, value, expected)
    if type(value) is str:
        try:
            os.fsencode(value)  # might be the name of a file, which need not be UTF-8
        except UnicodeEncodeError:
            raise _wrong(name, value, "valid text") from None
    return value


def _wrong(name: str, value: Any, expected: str) -> UserError:
    return UserError(f"config field {name} is {repr(value)[:60]}, not {expected}")


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Return dotted name -> what changed, in words, of the values that differ.

    >>> differences({"seed": 1, "text": {"level": "word"}}, {"seed": 1, "text": {"level": "char"}})
    {'text.level': 'text.level was word, is now char'}
    """
    a, b = flat(old), flat(new)
    changed = {
        name: f"{name} was {a.get(name)}, is now {b.get(name)}"
        for name in {**a, **b}
        if repr(a.get(name)) != repr(b.get(name))
    }
    hashes = [name for name in changed if name.endswith("data_sha256")]
    return changed | dict.fromkeys(hashes, "the data has changed")


def refuse_changes(old: Mapping[str, Any], new: Mapping[str, Any], place: Path) -> None:
    """Raise UsageError if settings differ from the old ones, those of the results in `place`."""
    if changed := differences(old, new):
        reasons = changed.get("recipe") or ", ".join(changed.values())
        raise UsageError(f"{place} holds results of other settings ({reasons}): use another --out")


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values under dotted names.

    >>> flat({"seed": 1, "model": {"hidden": 200}})
    {'seed': 1, 'model.hidden': 200}
    """
    named: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            named |= flat(value, f"{prefix}{name}.")
        else:
            named[f"{prefix}{name}"] = value
    return named
