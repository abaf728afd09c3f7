"""What a person sees of a run on a terminal."""

from io import StringIO

import pytest
from rich.console import Console

from normrnn.config.measure import NATS, Measure
from normrnn.engine.display import Status, TextDisplay, describe
from normrnn.speech.config import FRAMES
from normrnn.text.config import CHARACTERS, WORDS


@pytest.mark.parametrize(
    ("measure", "fer", "said"),
    [
        (WORDS, None, "loss 1.0000  ppl 2.72"),
        (CHARACTERS, None, "loss 1.0000  bpc 1.4427"),
        (FRAMES, 0.25, "loss 1.0000  FER 25.00%"),
        (NATS, None, "loss 1.0000"),
    ],
)
def test_a_row_is_shown_in_its_measure(measure: Measure, fer: float | None, said: str) -> None:
    row = {"epoch": 1, "updates": 9, "split": "valid", "loss": 1.0}
    row |= {} if fer is None else {"fer": fer}
    assert describe(row, 2, measure) == f"epoch 1/2  update 9  valid  {said}"
    live = TextDisplay(2, measure, bar=True)
    at = {"epoch": 1, "index": 9, "epoch_updates": 9, "updates": 9}
    live.update(Status(**at, seconds=1.0, loss=1.0, count=9, lr=0.5, error_rate=fer))
    assert live.bar is not None
    assert said.replace("1.0000", "1.000") in live.bar.tasks[0].fields["state"]


@pytest.mark.parametrize("width", [80, 120])
def test_progress_is_one_line(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    display = TextDisplay(55, WORDS, bar=True)
    for i in range(1, 3):
        monkeypatch.setattr("time.monotonic", lambda i=i: 0.2 * i)
        at = {"epoch": 12, "index": 1451 + i, "epoch_updates": 1453, "updates": 17000 + i}
        display.update(Status(**at, seconds=0.2 * i, loss=4.321, count=640, lr=0.015625))
    console = Console(file=StringIO(), width=width)
    assert display.bar is not None
    console.print(display.bar.get_renderable())
    (shown,) = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    for part in ("epoch 12/55", "1453/1453", "loss 4.321", "ppl 75.26"):
        assert part in shown
    # 640 tokens in 0.2 s; 43 epochs of 1453 updates are to come.
    assert "3,200 tokens/s  3:28:16 left" in shown
    assert ("lr 0.015625" in shown) == (width == 120)


def test_a_network_without_statistics_has_no_kind_of_them() -> None:
    row = {"epoch": 1, "updates": 9, "split": "valid", "statistics": "running", "loss": 1.0}
    assert describe(row, 2, NATS, statistics=False) == "epoch 1/2  update 9  valid  loss 1.0000"
