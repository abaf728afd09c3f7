"""Typed, complete settings of a run. No torch in here: `normrnn --help` reads this file.

Every class is frozen and flat, every field has a name that appears on the command line
(`--model.hidden 200`) and in `config.json`. A field added later needs a default, so that old
run directories stay readable.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, get_args, get_type_hints

from tyro.conf import Suppress

from normrnn import norms
from normrnn.config.jsonio import flat, to_dict
from normrnn.errors import UsageError


def checked_norms(chosen: "str | Iterable[str | None]", name: str) -> tuple[str, ...]:
    """Return normalisations, each once, from a comma-separated string or a sequence; None and
    "None" are the baseline. UsageError, with the name of the argument, for an unknown one.

    >>> checked_norms("none,frame", "norms"), checked_norms([None, "frame"], "norms")
    (('none', 'frame'), ('none', 'frame'))
    """
    several = chosen.split(",") if isinstance(chosen, str) else chosen
    found = tuple(dict.fromkeys(norms.BASELINE if n in (None, "None") else n for n in several))
    unknown = [norm for norm in found if norm not in norms.names()]
    if unknown or not found:
        wrong = ", ".join(map(repr, unknown)) or "nothing"
        raise UsageError(f"{name} has {wrong}, not one of {', '.join(norms.names())}")
    return found


def normalise_gamma(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted names, with the norm's own γ as None, whichever way it was given:
    runs from before None was the default have the number.

    >>> normalise_gamma({"norm": "frame", "model.gamma": 1.0})
    {'norm': 'frame', 'model.gamma': None}
    """
    result, norm = dict(settings), settings.get("norm")
    if norm in norms.names() and result.get("model.gamma") == norms.get(norm).gamma:
        result["model.gamma"] = None
    return result


_LARGEST = 2**31 - 1
LARGEST_FLOAT = 1e38  # of float32, and a range of twice as much fits too


@dataclass(frozen=True)
class Bounds:
    """The values that a setting may have; `ends` are brackets, round where an end is excluded."""

    low: float
    high: float = math.inf
    ends: str = "[]"

    def allows(self, value: float) -> bool:
        """Whether a value is within the bounds."""
        above = value >= self.low if self.ends[0] == "[" else value > self.low
        return above and (value <= self.high if self.ends[1] == "]" else value < self.high)

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"be {'at least' if self.ends[0] == '[' else 'above'} {self.low}"
        return f"lie in {self.ends[0]}{self.low}, {self.high}{self.ends[1]}"


Count = Annotated[int, Bounds(0)]
Positive = Annotated[int, Bounds(1)]
NotNegative = Annotated[float, Bounds(0)]
AboveZero = Annotated[float, Bounds(0, ends="(]")]
Share = Annotated[float, Bounds(0, 1)]
Layers = Annotated[int, Bounds(1, 1000)]
Probability = Annotated[float, Bounds(0, 1, ends="[)")]


def check_bounds(settings: Any, prefix: str = "") -> None:
    """Raise UsageError for a field of a dataclass, or of those in it, that is out of bounds."""
    hints = get_type_hints(type(settings), include_extras=True)
    for field_ in fields(settings):
        name, value = f"{prefix}{field_.name}", getattr(settings, field_.name)
        if is_dataclass(value):
            check_bounds(value, f"{name}.")
            continue
        bounds = [b for b in get_args(hints[field_.name])[1:] if isinstance(b, Bounds)]
        if isinstance(value, float) and not abs(value) <= LARGEST_FLOAT:
            raise UsageError(f"{name} must be a finite number up to 1e38, not {value}")
        for one in bounds:
            if not one.allows(value):
                raise UsageError(f"{name} must {one}, not {value}")
        if isinstance(value, int) and name != "seed" and value > _LARGEST:
            raise UsageError(f"{name} must be at most {_LARGEST:,}, not {value:,}")


def bits(loss: float) -> float:
    """Convert nats to bits.

    >>> bits(math.log(2))
    1.0
    """
    return loss / math.log(2)


@dataclass(frozen=True, kw_only=True)
class Measure:
    """How the loss of a task is shown."""

    name: str
    long: str = ""
    """In words; default: the name."""
    axis: str = ""
    """Label of a picture's axis; default: the name."""
    convert: Callable[[float], float] = float
    """What is shown of a loss in nats. Rows of a user's own task have it: finite for any loss."""
    digits: int = 3
    log: bool = False
    """Whether a picture's axis is logarithmic."""
    unit: str = "targets"
    """Plural of what is counted."""
    held_out: str = "valid"
    """What the split for validation is called."""
    higher_is_better: bool = False
    """Whether larger values are better; losses are always better the lower they are."""
    batch_mean: tuple[str, Callable[[float], float]] | None = None
    """Key in rows of metrics.jsonl, and function of a loss whose mean over batches is shown too."""
    error_rate: tuple[str, str] | None = None
    """Key in rows of metrics.jsonl, and name, of the share of wrong predictions, where counted."""
    columns: Mapping[str, Callable[[float], float]] = field(default_factory=dict)
    """Further functions of the loss in every row of metrics.jsonl, by their key there."""
    brief: tuple[str, Callable[[float], float], int] | None = None
    """What a line of output shows beside the loss: name, function of the loss, digits."""

    def __post_init__(self) -> None:
        for name in ("long", "axis"):
            object.__setattr__(self, name, getattr(self, name) or self.name)

    def text(self, loss: float | None) -> str:
        """Return what is shown of a loss, or a dash."""
        return "–" if loss is None else f"{self.convert(loss):,.{self.digits}f}"

    def quality(self, loss: float, row: Mapping[str, Any], digits: int) -> str:
        """Return the loss, with the error rate of the row or what `brief` says."""
        text = f"loss {loss:.{digits}f}"
        if self.error_rate and row.get(self.error_rate[0]) is not None:
            return f"{text}  {self.error_rate[1]} {row[self.error_rate[0]]:.2%}"
        if self.brief:
            name, convert, shown = self.brief
            return f"{text}  {name} {convert(loss):,.{shown}f}"
        return text


SHOWN = ("name", "long", "unit", "digits", "higher_is_better")
"""What config.json has of the measure of a user's own task."""
NATS = Measure(name="cross entropy", long="cross entropy in nats", axis="nats")
"""Default measure."""


@dataclass(frozen=True)
class OptimizerConfig:
    """One gradient step."""

    name: Literal["sgd", "adam", "adamw", "rmsprop"] = "sgd"
    """Method."""
    lr: NotNegative = 1.0
    """Learning rate of the first epochs."""
    momentum: NotNegative = 0.0
    """Momentum of sgd and rmsprop."""
    weight_decay: NotNegative = 0.0
    """Weight decay."""
    clip_norm: NotNegative = 0.0
    """Gradients with a larger global norm are scaled down to it. 0: never."""
    loss: Literal["sum_over_time", "mean"] = "sum_over_time"
    """What is differentiated: the loss summed over time and averaged over the batch, as Zaremba's
    and the authors' code do, or averaged over both, a step smaller by the window's length."""
    decay: AboveZero = 1.0
    """The learning rate is divided by this at every epoch after `decay_after`."""
    decay_after: Positive = 1
    """The last epoch (1-based) at the full learning rate."""


@dataclass(frozen=True, kw_only=True)
class LayersConfig:
    """Recurrent layers: size, normalisers, regularisers."""

    cell: Literal["lstm", "rnn", "gru", "ligru"] = "lstm"
    """Kind of the layers; rnn is the simple one with tanh."""
    hidden: Positive
    layers: Layers
    peephole: Literal["none", "output", "all"] = "none"
    """Diagonal peepholes of the LSTM: the paper's W_co, or all three."""
    gamma: float | None = None
    """Initial γ of the normalisers. None: the norm's own, 1, of recurrent 0.1."""
    eps: AboveZero = 1e-5
    """ε of the normalisers (the authors' code: 1e-6)."""
    momentum: Share = 0.1
    """Weight of the new value in the running statistics."""
    shrinkage: Share = 0.0
    """Shrinkage of the covariance towards its diagonal (whiten only)."""
    dropout: Probability = 0.0
    """Between layers and before the softmax; never on the recurrence."""
    dropout_kind: Literal["element", "locked"] = "element"
    """Every value by itself, or one mask per sequence, the same at all its steps."""
    weight_drop: Probability = 0.0
    """Share of the recurrent weights left out, others in every update."""
    zoneout_h: Probability = 0.0
    """Share of the states h that stay as they were in a step."""
    zoneout_c: Probability = 0.0
    """Share of the LSTM's cell states that stay as they were in a step."""

    def options(self, norm: norms.Norm) -> dict[str, Any]:
        """Return the arguments of `engine.model.SequenceModel` besides inputs and outputs."""
        same = ("cell", "hidden", "layers", "gamma", "eps", "momentum", "shrinkage", "dropout")
        same += ("dropout_kind", "weight_drop")
        return {
            "norm": norm.name if norm.normalises else None,
            "peephole": None if self.peephole == "none" else self.peephole,
            **{name: getattr(self, name) for name in same},
            "zoneout": (self.zoneout_h, self.zoneout_c),
        }


@dataclass(frozen=True)
class LoopConfig:
    """Batches, and when to log and save."""

    batch: Positive = 32
    """Sequences or streams of an update."""
    segments: Positive = 1
    """Parts of an epoch. Each starts from zero state and ends with a validation."""
    log_every: Positive = 100
    """Updates per train row of metrics.jsonl."""
    checkpoint_every: Positive = 200
    """Updates between checkpoints inside an epoch."""
    sync_statistics: bool = True
    """With several processes, pool statistics over all of them, so that a batch is normalised as
    one process would; without it each normalises its own part."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """What every experiment has; the recipe's name tells which kind it is.

    A subclass is the torch-free half of a task: its settings, what it measures, and where the
    rest of it is.
    """

    noun: ClassVar[str] = "an experiment"
    """What is trained, in words."""
    task: ClassVar[str] = ""
    """Import path `module:class` of the `engine.task.Task` that trains, loads and evaluates it."""
    predicts_inputs: ClassVar[bool] = False
    """Whether its targets are later inputs: what sees these has no loss of predicting them."""
    is_ragged: ClassVar[bool] = False
    """Whether a batch may have fewer rows than a covariance has features."""
    measured: ClassVar[tuple[str, ...]] = ("data_sha256",)
    """How the fields begin that define what the loss is: runs that differ in one are not compared,
    and none is tuned."""
    recipe: Suppress[str]
    norm: Suppress[str] = norms.BASELINE
    """Normalisation of the recurrent layers; commands have an option of their own for it."""
    data: str = ""
    """What to train on."""
    data_sha256: Suppress[str] = ""
    shared_initialisation: Suppress[bool] = False
    """Set by training: with the same seed every norm starts from the same values of the parameters
    that it shares with the others, and sees the same batches and masks."""
    shown: Suppress[dict[str, Any]] = field(default_factory=dict)
    """Recorded measure of a user-defined task, so that reports need not import it."""
    epochs: Positive = 15
    """Passes over the training data."""
    seed: Annotated[int, Bounds(0, 2**32, ends="[)")] = 1
    """Seed of weights, dropout and the order of the data."""
    device: str = "cpu"
    """Where to train: cpu, cuda, cuda:1, mps; auto takes the fastest that is there."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of products in training: bf16 runs updates under autocast. Weights, recurrences, statistics,
    losses and evaluations stay in fp32."""
    threads: Count = 0
    """Threads of the tensor library. 0: its own choice."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: LoopConfig = field(default_factory=LoopConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", *checked_norms([self.norm], "norm"))
        check_bounds(self)
        if not type(self).__module__.startswith("normrnn."):
            shown = {name: getattr(self.loss_measure, name) for name in SHOWN}
            object.__setattr__(self, "shown", shown)
        if self.normalisation.keeps_statistics and self.train.batch < 2:
            raise UsageError(f"norm {self.norm} needs train.batch of at least 2, not 1")
        model = getattr(self, "model", None)
        if not isinstance(model, LayersConfig):
            return
        for name in ("peephole", "zoneout_c"):
            if model.cell != "lstm" and getattr(model, name) not in ("none", 0.0):
                raise UsageError(f"model.{name} is for cell lstm, not {model.cell}")
        if self.is_ragged and self.normalisation.more_rows_than_features and not model.shrinkage:
            raise UsageError(f"norm {self.norm} needs model.shrinkage above 0, as 0.1")

    @property
    def normalisation(self) -> norms.Norm:
        """Return the entry of `norm` in the table of normalisations."""
        return norms.get(self.norm)

    @classmethod
    def measure(cls, settings: Mapping[str, Any]) -> Measure:  # noqa: ARG003
        """Return how the loss is shown; `settings` by dotted names, as far as they are recorded."""
        return NATS

    @property
    def loss_measure(self) -> Measure:
        """Return how the loss of this experiment is shown."""
        measure = self.measure(flat(to_dict(self)))
        stored = {} if type(self).__module__.startswith("normrnn.") else {"value": measure.convert}
        return replace(measure, columns={**measure.columns, **stored})
