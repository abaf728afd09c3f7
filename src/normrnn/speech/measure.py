"""What an acoustic model is measured in."""

from normrnn.config.measure import Measure

FRAMES = Measure(
    name="FCE",
    long="frame-wise cross entropy (FCE)",
    axis="FCE, nats",
    of=float,
    digits=3,
    log=False,
    unit="frames",
    held_out="dev",
    error_rate=("fer", "FER"),
)
