"""Start, resume or extend a run."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from normrnn.data.corpus import build_corpus
from normrnn.data.text import BUILTIN, read_texts
from normrnn.data.vocabulary import Vocabulary
from normrnn.errors import UsageError, UserError
from normrnn.recipes.config import Config
from normrnn.train.display import Display
from normrnn.train.interrupt import Interrupt
from normrnn.train.language import LanguageTask
from normrnn.train.loop import Trainer
from normrnn.train.rundir import CONFIG, VOCABULARY, RunDirectory, changed_fields


def train(
    config: Config,
    out: Path,
    display: Callable[[int, str], Display],
    say: Callable[[str], None] = print,
) -> None:
    """Bring the run in `out` to the last epoch of `config`, from wherever it stands.

    `display` is made from the number of epochs and the name of what is counted.
    """
    device = _device(config.device)
    texts = read_texts(config.data)
    where = config.data if config.data == BUILTIN else str(Path(config.data).expanduser().resolve())
    config = dataclasses.replace(config, data=where, data_sha256=texts.sha256)
    run = RunDirectory(out)
    run.create()
    with run.locked():
        checkpoint = None
        if run.has(CONFIG):
            _refuse_changes(run.config(), config, out)
            checkpoint = run.read_checkpoint(config)
        if checkpoint and checkpoint["finished"] >= config.epochs:
            say(f"{out} is finished: {config.epochs} epochs. A larger --epochs goes on from there.")
            return
        say(f"data: {texts.source}")
        if config.threads:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        corpus = build_corpus(texts, config.text)
        task = LanguageTask(config, corpus, device)
        with Interrupt() as interrupt, display(config.epochs, task.unit) as shown:
            trainer = Trainer(config, task, run, shown, interrupt)
            if checkpoint:
                if Vocabulary.from_json(run.read(VOCABULARY)) != corpus.vocabulary:
                    raise UserError(f"{out / VOCABULARY} does not match the checkpoint beside it")
                trainer.load(checkpoint)
                say(f"resuming {out} at update {trainer.progress.updates}")
            else:
                run.write(VOCABULARY, corpus.vocabulary.to_json().encode())
                run.metrics.cut(0)
            run.write_config(config)
            trainer.run()
    say(f"{out} is finished: {config.epochs} epochs.")


def _refuse_changes(old: Config, new: Config, out: Path) -> None:
    changed = changed_fields(old, new)
    if not changed and new.epochs < old.epochs:
        changed = f"epochs was {old.epochs}, is now {new.epochs}"
    if changed:
        raise UsageError(f"{out} holds a run with other settings ({changed}): use another --out")


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"no device {name!r}: {reason}", code=2) from None
    return device
