"""Every layer against the naive loop: outputs, final states, all gradients, all buffers.

For each cell and norm some combinations of all other options are drawn at random.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import normrnn
from tests.helpers import CELLS, NORMS, STATISTICAL, build, check_against_reference, randomise

PLAIN_CELLS = {"tanh", "relu", "lstm", "gru"}
FORMS = ["dense", "padded", "batch_first", "sorted", "unsorted", "unbatched"]
MODES = ["train", "train", "eval", "batch statistics"]
LENGTHS = {
    "dense": [[5, 5, 5], [4, 4, 4]],
    "sorted": [[5, 4, 4, 1], [6, 4, 2]],
    "unbatched": [[5]],
    # A single row at the end; sequences without frames.
    "unsorted": [[2, 5, 3], [5, 1, 4, 5]],
    "padded": [[2, 5, 3], [5, 1, 4, 5], [2, 0, 5, 0, 3]],
}
WIDE = [9, 3, 9, 7, 9, 3, 8, 8, 9, 9, 9, 3, 5]
"""For float32: at least six rows in every time step."""
OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"affine": False},
    {"eps": 0.1, "momentum": None},
    {"momentum": 1.0},
    {"learn_initial_state": True},
    {"track_running_stats": False},
    {"proj_size": 1},
    {"cell_norm": True},
    {"zoneout": (0.3, 0.0)},
    {"zoneout": (0.3, 0.6)},
]


@dataclass(frozen=True)
class Case:
    cell: str
    norm: str
    form: str
    mode: str
    lengths: list[int]
    options: dict[str, Any] = field(default_factory=dict)
    is_wide: bool = False
    """Float32 and larger sizes, for the kernels."""
    backend: Any = "auto"
    resets: bool = False
    how: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = self.cell, self.norm, self.form, self.mode, self.backend, self.lengths, self.options
        more = " resets" * self.resets + " float32" * self.is_wide
        return " ".join(map(str, parts)) + more + f" {self.how}"


def drawn(cell: str, norm: str, draw: random.Random, is_wide: bool) -> Case:
    is_lstm = cell.startswith("lstm")
    form = draw.choice(["dense", "padded"] if is_wide else FORMS)
    mode = draw.choice(MODES)
    if mode != "eval" and form == "unbatched" and norm not in ("sequence", "layer", "rms", "none"):
        mode = "eval"  # every time step is a single row
    lengths = draw.choice(LENGTHS.get(form, LENGTHS["padded"]))
    if is_wide:
        lengths = [9] * 13 if form == "dense" else WIDE
    option = dict(draw.choice(OPTIONS))
    if "cell_norm" in option and not (is_lstm and norm in ("layer", "rms", "recurrent-shared")):
        option = {}
    if "zoneout" in option and (mode != "eval" or (option["zoneout"][1] and not is_lstm)):
        option = {}  # shares at test time; random masks in training
    if "proj_size" in option and cell != "lstm":
        option = {}
    if "track_running_stats" in option and (norm not in STATISTICAL or form != "dense"):
        option = {}
    resets = draw.random() < 0.4
    how = {
        "T": max(lengths) + (draw.random() < 0.5 and form in ("padded", "batch_first")),
        "with_state": draw.random() < 0.7,
        "reset_to": draw.choice([0, 1, len(lengths)]) if resets else 0,
        "constant": draw.choice([(), (), (0,), (1, 3)]) if not is_wide else (),
    }
    if norm.startswith("hidden") and not how["with_state"]:
        how["constant"] = ()  # no variance at all: rounding decides
    by_torch = cell in PLAIN_CELLS and not resets and "zoneout" not in option
    by_torch &= norm in ("sequence", "frame", "frame-slots", "whiten", "none") or (
        mode == "eval"
        and norm in ("hidden-shared", "recurrent-shared")
        and "cell_norm" not in option
    )
    backend = draw.choice(["auto", "loop", "torch"] if by_torch else ["auto", "loop"])
    option |= {"num_layers": draw.choice([1, 2]), "bidirectional": draw.random() < 0.6}
    option["batch_first"] = form == "batch_first"
    return Case(cell, norm, form, mode, lengths, option, is_wide, backend, resets, how)


def cases(rounds: int, wide: int) -> list[Case]:
    draw = random.Random(rounds)
    kinds = [False] * rounds + [True] * wide
    return [drawn(c, n, draw, is_wide) for c in CELLS for n in NORMS for is_wide in kinds]


def check(case: Case) -> None:
    if case.is_wide:
        make, own = CELLS[case.cell]
        options = {**own, **NORMS[case.norm], **case.options}
        if "proj_size" in options:
            options["proj_size"] = 7
        layer = make(5, 11, **options)
        randomise(layer)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(0.5)
    else:
        layer = build(case.cell, case.norm, **case.options)
    layer.train(case.mode == "train")
    tracks = case.options.get("track_running_stats", True)
    batch = True if case.mode == "batch statistics" or not tracks else None
    T, B = case.how["T"], len(case.lengths)
    resets = torch.rand(T, B) < 0.3 if case.resets else None
    how: dict[str, Any] = {**case.how, "batch_statistics": batch, "resets": resets}
    how["tol"] = 1e-7 if case.norm == "whiten" else 1e-9
    with normrnn.backend(case.backend):
        if case.mode == "batch statistics":
            with normrnn.batch_statistics(layer):
                check_against_reference(layer, case.lengths, case.form, **how)
        else:
            check_against_reference(layer, case.lengths, case.form, **how)


FAST = cases(5, 1)
pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    pytest.mark.filterwarnings("ignore:norm='layer' of a single input feature"),
]


@pytest.mark.parametrize("case", FAST, ids=str)
def test_a_layer_is_the_reference(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(40, 8), ids=str)
def test_a_layer_is_the_reference_at_length(case: Case) -> None:
    check(case)


def test_the_drawn_cases_cover_the_options() -> None:
    """With every norm."""
    for norm in NORMS:
        own = [case for case in FAST if case.norm == norm]
        assert {case.form for case in own} == set(FORMS)
        assert {case.mode for case in own} == set(MODES)
        assert {case.resets for case in own} == {case.is_wide for case in own} == {True, False}
        assert {"auto", "loop"} <= {case.backend for case in own}
    used = {key for case in FAST for key, value in case.options.items() if value is not None}
    assert {key for option in OPTIONS for key in option} <= used | {"momentum"}
    assert "torch" in {case.backend for case in FAST}
