"""What was recorded of back-propagation: table, words."""

from normrnn.reporting.gradients import sentence, table

LAYER = {
    "gradient": [1.0, 2.0, 4.0],
    "gradient_of_the_end": [0.5, 1.0, 2.0],
    "spread": [1.0, 1.0, 0.25],
    "growth_per_step": 0.5,
}
HIDDEN = LAYER | {"spread_before": [3.0, 4.0, 5.0], "mean_gamma": 0.125}
RECORDS = [
    {"label": "norm none", "loss": 2.0, "layers": {"l0": LAYER, "l0_reverse": LAYER}},
    {"label": "norm hidden", "loss": 1.5, "layers": {"l0": HIDDEN, "l1": HIDDEN}},
]


def test_table() -> None:
    lines = table(RECORDS).rows
    assert lines[0] == [
        "norm none, l0",
        "2.000",
        "0.500",
        "2.0e+00",
        "5.0e-01",
        "–",
        "1.00 … 0.25",
        "–",
    ]
    # A reverse layer's gradient starts at the first time step.
    assert lines[1][3:5] == ["5.0e-01", "2.0e+00"]
    assert lines[3][0] == "norm hidden, l1"
    assert lines[3][5:] == ["0.125", "1.00 … 0.25", "3.00 … 5.00"]
    broken = [{"label": "x", "loss": 9.0, "layers": {"l0": LAYER | {"spread": [9.5, 1.5e21]}}}]
    assert table(broken).rows[0][6] == "9.50 … 1.5e+21"


def test_sentence() -> None:
    assert "0.500" in sentence("l0", LAYER)
    assert "vanishes" in sentence("l0", LAYER)
    assert "explodes" in sentence("l0_reverse", LAYER | {"growth_per_step": 2.0})
    assert "keeps its size" in sentence("l0", LAYER | {"growth_per_step": 0.99})
    assert sentence("l0", LAYER | {"growth_per_step": None})
