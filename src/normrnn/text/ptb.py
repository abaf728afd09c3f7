"""Check Penn Treebank as prepared by Mikolov."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from normrnn.errors import UserError
from normrnn.files import ROWS, read_regular

SOURCE = (
    "Mikolov's preparation is free for research: simple-examples.tgz at"
    " http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz holds the three files in"
    " simple-examples/data"
)


@dataclass(frozen=True)
class PtbFile:
    """Name, hash and tokens of a file of the corpus."""

    name: str
    sha256: str
    tokens: int


FILES = (
    PtbFile(
        "ptb.train.txt", "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf", 929_589
    ),
    PtbFile(
        "ptb.valid.txt", "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2", 73_760
    ),
    PtbFile(
        "ptb.test.txt", "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0", 82_430
    ),
)


def check_ptb(directory: Path) -> dict[str, int]:
    """Return the tokens with <eos> of every file; UserError if one is missing or changed."""
    missing = [f.name for f in FILES if not (directory / f.name).is_file()]
    if missing:
        raise UserError(f"{directory} lacks {', '.join(missing)}. {SOURCE}")
    counts = {}
    for file in FILES:
        raw = read_regular(directory / file.name, ROWS)
        counts[file.name] = len(raw.split()) + raw.count(b"\n")
        if hashlib.sha256(raw).hexdigest() != file.sha256:
            raise UserError(
                f"{directory / file.name} is not the file the paper used:"
                f" {counts[file.name]:,} tokens where {file.tokens:,} are right, or other bytes."
                f" {SOURCE}"
            )
    return counts
