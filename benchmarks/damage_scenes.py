"""Directories as people have them, and for each of their files a command that reads it."""

import json
import os
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import kaldiio
import numpy as np
import soundfile
import torch
from safetensors.torch import load_file

from normrnn.config.base import Config, OptimizerConfig
from normrnn.config.jsonio import flat, to_dict
from normrnn.deploy.export import SUFFIXES, export
from normrnn.engine.interrupt import Interrupted
from normrnn.engine.start import open_experiment
from normrnn.experiments.search.plan import Plan
from normrnn.experiments.search.study import Study
from normrnn.experiments.search.worker import work
from normrnn.ops.native import library
from normrnn.recipes import recipe
from normrnn.reporting.study import RecordedStudy, write
from normrnn.speech.config import (
    AcousticConfig,
    SpeechConfig,
    SpeechEvaluationConfig,
    UtteranceConfig,
)
from normrnn.speech.corpus import read_speech
from normrnn.speech.prepare.kaldi import Side, kaldi_job
from normrnn.speech.prepare.preparation import prepare
from normrnn.text import large
from normrnn.text.config import EvaluationConfig, LanguageConfig, ModelConfig, TrainConfig
from tests.sounds import RATE, sung, write_librispeech
from tests.tiny_runs import rows_of, run_tiny, write_texts
from tests.tiny_speech import write_speech

TEXT = LanguageConfig(
    recipe="ptb-small",
    norm="frame",
    data="text",
    epochs=2,
    threads=1,
    model=ModelConfig(hidden=8, dropout=0.25),
    train=TrainConfig(batch=8, steps=8, segments=2, log_every=4, checkpoint_every=6),
    evaluation=EvaluationConfig(train_tokens=300, recalibrate_windows=4),
)
SPEECH = SpeechConfig(
    recipe="librispeech-mini",
    norm="sequence",
    data="speech",
    epochs=2,
    threads=1,
    model=AcousticConfig(hidden=5, layers=2),
    optimizer=OptimizerConfig(lr=0.02, momentum=0.9),
    train=UtteranceConfig(
        batch=4, segments=2, log_every=2, checkpoint_every=3, piece_frames=15, pool=2
    ),
    evaluation=SpeechEvaluationConfig(train_utterances=3, recalibrate_batches=3),
)
KALDI = ["prepare", "kaldi", "--data", "kaldi/data", "--ali", "kaldi/ali", "--processes", "1"]
SOUND = ["prepare", "kaldi", "--data", "sound/data", "--ali", "sound/ali", "--processes", "1"]
LIBRISPEECH = ["prepare", "librispeech", "librispeech", "--processes", "1"]
LIBRISPEECH += ["--lexicon", "librispeech/lexicon"]
FORMATS = ("torch", "safetensors", "onnx", "program")
SPACE = {"optimizer.lr": {"low": 1e-3, "high": 0.1, "log": True}, "train.batch": [8, 16]}


def flags(config: Config) -> list[str]:
    """A config on the command line."""
    usual = flat(to_dict(recipe(config.recipe)))
    words = ["train", config.recipe]
    for name, value in flat(to_dict(config)).items():
        if usual[name] != value:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def texts(root: Path) -> None:
    """Three texts."""
    root.mkdir()
    write_texts(root)


def stopped(root: Path) -> None:
    """A language model near its end."""
    _stop(TEXT, root, 56)


def finished(root: Path) -> None:
    """The same, finished."""
    run_tiny(TEXT, root)


def baseline(root: Path) -> None:
    """The other arm."""
    run_tiny(replace(TEXT, norm="none"), root)


def speech_stopped(root: Path) -> None:
    """An acoustic model near its end."""
    _stop(SPEECH, root, 9)


def speech_finished(root: Path) -> None:
    """The same, finished."""
    run_tiny(SPEECH, root)


def _stop(config: Config, root: Path, at: int) -> None:
    try:
        run_tiny(config, root, stop_at=at)
    except Interrupted:
        return
    raise AssertionError(f"finished before update {at}")


def kaldi(root: Path) -> None:
    """Features of four speakers in all formats, their alignments, and a list of speakers."""
    draw = np.random.default_rng(1)
    lengths = {f"{speaker}-{n}": int(draw.integers(4, 12)) for speaker in "abcd" for n in (1, 2)}
    (root / "data").mkdir(parents=True)
    (root / "ali").mkdir()
    scp = ""
    for number, (method, text) in enumerate(((None, False), (2, False), (3, False), (None, True))):
        keys = [key for key in lengths if key[0] == "abcd"[number]]
        some = {key: draw.normal(size=(lengths[key], 4)).astype("f4") for key in keys}
        table = root / "data" / "some.scp"
        kaldiio.save_ark(
            str(root / "data" / f"raw{number}.ark"),
            some,
            scp=str(table),
            text=text,
            compression_method=method,
        )
        scp += table.read_text()
        table.unlink()
    (root / "data" / "feats.scp").write_text(scp)
    (root / "data" / "utt2spk").write_text("".join(f"{key} {key[0]}\n" for key in lengths))
    (root / "data" / "text").write_text("".join(f"{key} WORDS OF {key}\n" for key in lengths))
    labels = {key: np.arange(n, dtype=np.int32) % 5 for key, n in lengths.items()}
    kaldiio.save_ark(str(root / "ali" / "pdf.ark"), labels)
    (root / "ali" / "num_pdfs").write_text("5\n")
    (root / "speakers").write_text("b\n")


def begun(root: Path) -> None:
    """A preparation of it that was stopped half way."""
    job = kaldi_job(
        Side(Path("kaldi/data"), Path("kaldi/ali")),
        None,
        deltas=False,
        allow_pipes=False,
        classes=None,
        sample_rate=RATE,
        dev_speakers=None,
        dev_fraction=0.3,
    )

    def stop(done: int, *_: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    try:
        prepare(job, root, 1, stop)
    except KeyboardInterrupt:
        return
    raise AssertionError("not stopped")


def sound(root: Path) -> None:
    """Two recordings, their segments, and text alignments."""
    (root / "data").mkdir(parents=True)
    (root / "ali").mkdir()
    table, segments, lines = "", "", ""
    for number, speaker in enumerate("ab"):
        path = root / "data" / f"{speaker}.wav"
        soundfile.write(path, sung(100 + 20 * number), RATE)
        table += f"{speaker} {path}\n"
        for part, end in enumerate((0.8, 1.7)):
            segments += f"{speaker}-{part} {speaker} {end - 0.7:.1f} {end}\n"
            lines += f"{speaker}-{part} {' '.join(str(i % 3) for i in range(68))}\n"
    (root / "data" / "wav.scp").write_text(table)
    (root / "data" / "segments").write_text(segments)
    spoken = "".join(f"{line.split()[0]} {line.split()[1]}\n" for line in segments.splitlines())
    (root / "data" / "utt2spk").write_text(spoken)
    (root / "ali" / "pdf.ark").write_text(lines)


def librispeech(root: Path) -> None:
    """A corpus with sound, words and a lexicon."""
    write_librispeech(root, speakers=("11", "12"), each=1)
    (root / "lexicon").write_text("ah AA\noh OW\n")


def study(root: Path) -> None:
    """What a search left."""
    draw = random.Random(1)
    trials = [
        {
            "trial": number,
            "state": "complete",
            "value": 1.0,
            "settings": {"optimizer.lr": 10 ** draw.uniform(-3, 0), "train.batch": 8},
            "arms": {
                norm: {"diverged": False, "loss": draw.uniform(1, 2), "train": 1.0}
                for norm in ("none", "hidden")
            },
        }
        for number in range(4)
    ]
    config = {k: v for k, v in to_dict(_char()).items() if k not in ("data", "norm", "device")}
    about = {"study": "s", "trials": 4, "norms": ["none", "hidden"], "sampler": "random"}
    about |= {"pruner": "none", "space": SPACE, "config": config}
    write(RecordedStudy(root, trials, about))


def search(root: Path) -> None:
    """A finished search in a database."""
    _search(root, f"sqlite:///{(root / 'study.db').resolve()}")


def _search(root: Path, storage: str) -> None:
    root.mkdir()
    config = _char()
    found = open_experiment(config)
    plan = Plan(replace(config, data=found.where, data_sha256=found.sha256), SPACE)
    name = "ptb-char"
    done = Study(name, storage, plan, 2, heartbeat=1)
    done.reclaim()
    work(done, root, lambda: None)
    about = {"study": name, "trials": 2, **plan.identity()}
    write(RecordedStudy(root, done.rows(), about))
    done.close()


def _char() -> LanguageConfig:
    config = recipe("ptb-char")
    assert isinstance(config, LanguageConfig)
    return replace(
        config,
        data="text",
        epochs=1,
        threads=1,
        model=replace(config.model, hidden=4, embedding=4, layers=1, time_steps=12),
        train=replace(config.train, steps=12, epoch_tokens=2000, log_every=2, checkpoint_every=5),
        evaluation=EvaluationConfig(train_tokens=0, recalibrate_windows=2, tokens=200),
    )


def space(root: Path) -> None:
    """What a search varies."""
    root.mkdir()
    (root / "space.json").write_text(json.dumps(SPACE))


def copies(root: Path) -> None:
    """Runs and a study as older versions wrote them, or as they are collected: no checksums."""
    for name in ("finished", "baseline", "study"):
        (root / name).mkdir(parents=True)
        for file in (Path(name) / n for n in ("config.json", "metrics.jsonl", "environment.json")):
            if file.exists():
                (root / file).write_bytes(_without_hash(file.read_bytes()))
    for file in (Path("study/trials.jsonl"), Path("study/study.json")):
        (root / file).write_bytes(_without_hash(file.read_bytes()))


def _without_hash(content: bytes) -> bytes:
    return re.sub(rb'"sha256": "[0-9a-f]{64}",\s*', b"", content)


def gradients(root: Path) -> None:
    """What `normrnn gradients` wrote before."""
    root.mkdir()
    (root / "g.json").write_text(json.dumps([{"label": "x", "layers": {}}]))


def cache(root: Path) -> None:
    """The compiled kernels, and beside the root a compiler that has them ready."""
    loaded = library.library()
    made = {} if loaded is None else {loaded.variant: loaded.path}
    cases = "".join(f'*"VARIANT={name} "*) made={path};;\n' for name, path in made.items())
    objects = 'for word; do case "$word" in *.o) made="$word";; esac; done'
    compiler = root.parent / "cc"
    compiler.write_text(
        f'#!/bin/sh\ncase "$* " in\n{cases}*) {objects};;\nesac\n'
        'while [ "$1" != -o ]; do shift; done\ncp "$made" "$2"\n'
    )
    compiler.chmod(0o700)
    (root / "normrnn").mkdir(parents=True, mode=0o700)
    _use_cache(root)
    again = library.library()
    assert again is not None
    assert [again.variant] == list(made)
    assert len(list((root / "normrnn").glob("*.so"))) == len(made) > 0


def exports(root: Path) -> None:
    """The finished run in every format, each with its card."""
    for name in FORMATS:
        export(Path("finished"), root / name, name)


def cached(root: Path) -> None:
    """A text as ids on disk, as for large ones, and a run on it."""
    root.mkdir()
    _texts_on_disk(root)
    run_tiny(replace(TEXT, norm="none"), root / "run")
    assert list((root / "cache" / "normrnn" / "texts").glob("*/train.ids"))


def _texts_on_disk(root: Path) -> None:
    """All texts are large, and what they become is kept here."""
    large.LARGE = 0
    os.environ["XDG_CACHE_HOME"] = str((root / "cache").resolve())


def _use_cache(root: Path) -> None:
    os.environ |= {"XDG_CACHE_HOME": str(root), "CC": str(root.parent / "cc")}
    library.library.cache_clear()


ROOTS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "text": (texts, ()),
    "stopped": (stopped, ("text",)),
    "finished": (finished, ("text",)),
    "baseline": (baseline, ("text",)),
    "speech": (write_speech, ()),
    "speech-stopped": (speech_stopped, ("speech",)),
    "speech-finished": (speech_finished, ("speech",)),
    "kaldi": (kaldi, ()),
    "begun": (begun, ("kaldi",)),
    "sound": (sound, ()),
    "librispeech": (librispeech, ()),
    "study": (study, ()),
    "search": (search, ("text",)),
    "copies": (copies, ("finished", "baseline", "study")),
    "space": (space, ()),
    "gradients": (gradients, ()),
    "cache": (cache, ()),
    "exports": (exports, ("finished", "text")),
    "cached": (cached, ("text",)),
}
"""Name -> what makes it, and what that needs."""


def tensors(run: str) -> Callable[[], Any]:
    """Rows, weights and checkpoint of a run; the time that it took aside."""

    def read() -> Any:
        assert (Path(run) / "metrics.jsonl").is_file()
        found = {"rows": rows_of(Path(run))}
        found |= {path.name: load_file(path) for path in sorted(Path(run).glob("*.safetensors"))}
        payload = torch.load(Path(run) / "checkpoint.pt", weights_only=True)
        return found | {"model": payload["model"], "best": payload["best"]}

    return read


def contents(*patterns: str) -> Callable[[], Any]:
    """The files of a directory; the content of locks is not compared."""
    return lambda: {
        str(path): path.read_bytes()
        for pattern in patterns
        for path in sorted(Path().glob(pattern))
        if path.is_file() and path.name != ".lock"
    }


def readable(out: str) -> Callable[[], Any]:
    """What was prepared must be readable; what is in it is what was given."""

    def read() -> Any:
        corpus = read_speech(out)
        for split in (corpus.train, corpus.dev):
            for number in range(len(split.keys)):
                split.features(number)
                split.labels(number)
        return {}

    return read


@dataclass(frozen=True)
class Scene:
    """A command and what it reads."""

    command: list[str]
    reads: tuple[str, ...]
    """Roots, or patterns of files in them, that are damaged."""
    needs: tuple[str, ...] = ()
    """Further roots."""
    given: tuple[str, ...] = ()
    """Patterns of files that were given to us, and so can carry no checksum of ours."""
    products: Callable[[], Any] = dict
    """What the command leaves, read in its working directory."""
    said: bool = True
    """Whether what it says is part of what must not change."""
    weight: float = 1.0
    warms: bool = False
    """Whether it is run once in the process that the others are forked from."""
    before: Callable[[Path], None] | None = None
    """Called with the working directory in the process that runs the command."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the environment of a new process: paths in the working directory."""

    @property
    def roots(self) -> list[str]:
        """All that must be there."""
        named = {pattern.split("/")[0] for pattern in (*self.reads, *self.needs)}
        return [name for name in ROOTS if name in named]

    def files(self) -> list[Path]:
        """What may be damaged, in the working directory."""
        found = []
        for name in self.reads:
            places = Path().rglob(f"{name}/**/*") if name in ROOTS else Path().glob(name)
            found += [p for p in places if p.is_file() and p.suffix not in (".png", ".html")]
        return sorted(set(found))

    def is_given(self, file: Path) -> bool:
        """Whether a file was given to us."""
        return any(file.match(pattern) for pattern in self.given)


def _searching(out: str, *more: str) -> list[str]:
    options = ["--space", "space/space.json", "--trials", "2", "--heartbeat", "1", "--out", out]
    return ["search", *flags(_char())[1:], *options, *more]


SCENES = {
    "resume text": Scene(
        [*flags(TEXT), "--out", "stopped"],
        ("stopped", "text"),
        products=tensors("stopped"),
        said=False,
        warms=True,
        weight=5,
    ),
    "resume speech": Scene(
        [*flags(SPEECH), "--out", "speech-stopped"],
        ("speech-stopped", "speech"),
        products=tensors("speech-stopped"),
        said=False,
        warms=True,
        weight=5,
    ),
    "go on with a finished run": Scene(
        [*flags(replace(TEXT, epochs=2)), "--out", "finished"],
        ("finished/config.json", "finished/checkpoint*"),
        ("finished", "text"),
        products=tensors("finished"),
        said=False,  # the checkpoint before the last one is as good: its end is done again
        weight=1,
    ),
    "evaluate text": Scene(
        ["evaluate", "finished", "--threads", "1"],
        ("finished", "text"),
        products=contents("finished/evaluation.json"),
        warms=True,
        weight=4,
    ),
    "evaluate speech": Scene(
        ["evaluate", "speech-finished", "--threads", "1"],
        ("speech-finished", "speech"),
        products=contents("speech-finished/evaluation.json"),
        warms=True,
        weight=4,
    ),
    "posteriors": Scene(
        ["posteriors", "speech-finished", "--data", "speech/dev", "--out", "p", "--priors"],
        ("speech-finished/*.*", "speech/dev/feats.*", "speech/dev/checksums"),
        ("speech",),
        given=("feats.scp",),
        products=contents("p.ark", "p.scp"),
        warms=True,
        weight=3,
    ),
    "score": Scene(
        ["score", "finished", "text/valid.txt", "--lines"],
        ("finished", "text/valid.txt"),
        given=("*.txt",),
        warms=True,
        weight=2,
    ),
    "sample": Scene(["sample", "finished", "--seed", "1"], ("finished",), warms=True, weight=1),
    "report": Scene(
        ["report", "finished", "baseline", "stopped", "speech-finished", "study", "--markdown"],
        ("finished", "baseline", "stopped", "speech-finished", "study"),
        warms=True,
        weight=1,
    ),
    "report of copies": Scene(
        ["report", "copies", "copies/study", "--markdown"],
        ("copies",),
        given=("*",),
        warms=True,
        weight=0.8,
    ),
    "gradients": Scene(
        ["gradients", "finished", "-o", "gradients/g.json"],
        ("finished", "gradients", "text"),
        given=("g.json",),
        products=contents("gradients/g.json"),
        warms=True,
        weight=0.4,
    ),
    "prepare": Scene(
        [*KALDI, "--dev-speakers", "kaldi/speakers", "--out", "out"],
        ("kaldi",),
        given=("*",),
        products=readable("out"),
        weight=4,
    ),
    "go on with a preparation": Scene(
        [*KALDI, "--dev-fraction", "0.3", "--out", "begun"],
        ("begun",),
        ("kaldi",),
        products=contents("begun/*", "begun/*/*"),
        said=False,
        weight=3,
    ),
    "prepare sound": Scene(
        [*SOUND, "--dev-fraction", "0.5", "--out", "out"],
        ("sound",),
        given=("*",),
        products=readable("out"),
        weight=2,
    ),
    "prepare librispeech": Scene(
        [*LIBRISPEECH, "--dev-fraction", "0.5", "--out", "out"],
        ("librispeech",),
        given=("*",),
        products=readable("out"),
        weight=0.4,
    ),
    "kernels": Scene(
        ["evaluate", "finished", "--threads", "1"],
        ("cache",),
        ("finished", "text"),
        products=contents("finished/evaluation.json"),
        before=lambda where: _use_cache(where / "cache"),
        variables={"XDG_CACHE_HOME": "cache", "CC": "cc"},
        weight=1,
    ),
    "search": Scene(
        _searching("search"),
        ("search",),
        ("space", "text"),
        products=contents("search/trials.jsonl", "search/study.json", "search/summary.md"),
        weight=0.08,
    ),
    "space": Scene(
        _searching("study"),
        ("space",),
        ("study", "text"),
        given=("space.json",),
        weight=0.3,
    ),
    "evaluate a large text": Scene(
        ["evaluate", "cached/run", "--threads", "1"],
        ("cached/cache/**/*",),
        ("cached", "text"),
        products=contents("cached/run/evaluation.json"),
        before=lambda where: _texts_on_disk(where / "cached"),
        weight=1,
    ),
    "info of a run": Scene(["info", "finished"], ("finished",), warms=True, weight=1),
    **{
        f"info of an export, {name}": Scene(
            ["info", f"exports/{name}/model{SUFFIXES[name]}"],
            (f"exports/{name}/*",),
            given=("*",),
            warms=True,
            weight=0.5,
        )
        for name in FORMATS
    },
    "info of a card": Scene(
        ["info", "exports/torch"], ("exports/torch/README.md",), given=("*",), weight=0.2
    ),
}
