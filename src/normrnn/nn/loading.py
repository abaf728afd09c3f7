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
    """A key that is shown with a hint in torch's message, the only place that knows whether
    loading is strict, and is itself everywhere else."""

    hint: str

    def __format__(self, _: str) -> str:
        return self + f" ({self.hint})"


class Hinting(nn.Module):
    """Shows the hint with the first key that is missing, or too many."""

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
                keys[first] = _Key(keys[first])
                keys[first].hint = hint  # type: ignore[attr-defined]
                return
