"""What a person sees of a run on a terminal."""

from io import StringIO

import pytest
from rich.console import Console

from normrnn.engine.display import LiveDisplay, Status


def test_eighty_columns_have_room_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    display = LiveDisplay(55, "tokens")
    for i in range(1, 3):
        monkeypatch.setattr("time.monotonic", lambda i=i: 0.2 * i)
        at = {"epoch": 12, "index": 1451 + i, "epoch_updates": 1453, "updates": 17000 + i}
        display.update(Status(**at, seconds=0.2 * i, loss=4.321, count=640, lr=0.015625))
    console = Console(file=StringIO(), width=80)
    console.print(display.bar.get_renderable())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("epoch 12/55", "1453/1453", "loss 4.321", "ppl 75.26", "lr 0.015625"):
        assert part in shown
    # 640 tokens in 0.2 s; 43 epochs of 1453 updates are to come.
    assert "3,200 tokens/s  3:28:16 left" in shown
