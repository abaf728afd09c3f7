"""A word on the way when a state dict is another kind of layer's: convert, or fold."""

from collections.abc import Mapping
from typing import Any

from torch import nn

CONVERT = (
    "these are weights without a norm, of a torch.nn layer perhaps: load them into one, and "
    "normrnn.convert(model, batches=...) makes it normalised with its function kept"
)
FOLD = "these are weights of a normalised layer: load them into one, and normrnn.fold it"


class _Key(str):
    """A key that adds a hint to torch's errors when it is formatted into their message, the only
    place that knows whether loading is strict."""

    hint: str
    errors: list[str]

    def __format__(self, spec: str) -> str:
        if self.hint not in self.errors:
            self.errors.append(self.hint)
        return super().__format__(spec)

    def __reduce__(self) -> Any:
        return str, (str(self),)


class Hinting(nn.Module):
    """Adds a hint to the error of keys that are missing, or too many."""

    def _hint(self, state_dict: Mapping[str, Any], prefix: str) -> str:
        """Empty if there is none to give."""
        raise NotImplementedError

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        lists = missing_keys, unexpected_keys
        before = [len(keys) for keys in lists]
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, *lists, error_msgs
        )
        hint = self._hint(state_dict, prefix)
        for keys, first in zip(lists, before, strict=True):
            if hint and len(keys) > first:
                key = keys[first] = _Key(keys[first])
                key.hint, key.errors = hint, error_msgs
                return
