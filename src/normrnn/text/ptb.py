"""Check Penn Treebank as prepared by Mikolov."""

import hashlib
from pathlib import Path

from normrnn.errors import UserError
from normrnn.files import ROWS, read_regular

SOURCE = (
    "Mikolov's preparation is free for research: simple-examples.tgz at"
    " http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz holds the three files in"
    " simple-examples/data"
)
SHA256 = {
    "ptb.train.txt": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "ptb.valid.txt": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "ptb.test.txt": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}


def check_ptb(directory: Path) -> dict[str, int]:
    """Return the tokens with <eos> of every file; UserError if one is missing or changed."""
    counts = {}
    for name, sha256 in SHA256.items():
        file = directory / name
        if not file.is_file():
            raise UserError(f"{directory} has no {name}. {SOURCE}")
        raw = read_regular(file, ROWS)
        counts[name] = len(raw.split()) + raw.count(b"\n")
        if hashlib.sha256(raw).hexdigest() != sha256:
            raise UserError(
                f"{file}, of {counts[name]:,} tokens, is not the file the paper used. {SOURCE}"
            )
    return counts
