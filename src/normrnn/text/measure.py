"""What a language model is measured in."""

from normrnn.config.measure import Measure, bits, perplexity

WORDS = Measure(
    name="perplexity",
    long="perplexity",
    axis="perplexity",
    of=perplexity,
    digits=1,
    log=True,
    unit="tokens",
    held_out="valid",
    mean_of_batches=True,
    brief=("ppl", perplexity, 2),
)
CHARACTERS = Measure(
    name="cross entropy",
    long="cross entropy in nats per character",
    axis="nats per character",
    of=float,
    digits=3,
    log=False,
    unit="characters",
    held_out="valid",
    columns={"bpc": bits},
    brief=("bpc", bits, 4),
)
