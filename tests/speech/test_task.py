"""Training on speech: pooled metrics, resume, limits, what is stored with the model."""

import errno
import json
import math
from dataclasses import replace
from pathlib import Path

import kaldiio
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_sequence

import normrnn
from normrnn.commands.models import show
from normrnn.engine.loop import Interrupted
from normrnn.errors import UsageError, UserError
from normrnn.experiments.training import evaluate
from normrnn.runs.store import RunDirectory
from normrnn.speech.archive import write_matrix
from normrnn.speech.config import SpeechConfig
from normrnn.speech.corpus import read_speech
from normrnn.speech.task import AcousticModel, SpeechTask, write_posteriors
from normrnn.text.config import LanguageConfig
from tests.tiny_runs import rows_of, run_tiny
from tests.tiny_speech import DIM, write_speech


@pytest.fixture
def whole(tiny_speech: SpeechConfig, tmp_path: Path) -> Path:
    out = tmp_path / "whole"
    run_tiny(tiny_speech, out)
    return out


def _load(run: Path) -> AcousticModel:
    model = normrnn.load(run)
    assert isinstance(model, AcousticModel)
    assert not model.training
    return model


@pytest.mark.usefixtures("saved_with_running")
def test_statistics_that_are_no_numbers_are_left_out(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(whole)
    weights, notes = run.read_model()
    for name, value in weights.items():
        if name.endswith("running_mean"):
            value.fill_(math.nan)
    run.write_model(weights, notes)
    (run.path / "checkpoint.pt").unlink()  # which knows another model
    result = evaluate(whole)
    assert {row["statistics"] for row in result["rows"]} == {"recalibrated", "batch"}
    show(result, run.config())
    said = capsys.readouterr().out
    assert "running statistics left out" in " ".join(said.split())
    for value in weights.values():
        if value.is_floating_point():
            value.fill_(math.nan)
    run.write_model(weights, notes)
    with pytest.raises(UserError, match="gives no finite loss"):
        evaluate(whole)


def test_rows_of_a_run(tiny_speech: SpeechConfig, whole: Path, speech_dir: Path) -> None:
    rows = rows_of(whole)
    corpus = read_speech(speech_dir)
    train = [r for r in rows if r["split"] == "train"]
    for epoch in (1, 2):
        assert sum(r["count"] for r in train if r["epoch"] == epoch) == sum(corpus.train.lengths)
    assert all({"loss", "fer", "lr", "grad_norm"} <= r.keys() for r in train)
    for split, count in (("valid", sum(corpus.dev.lengths)), ("train_eval", 31 + 7 + 33)):
        some = [r for r in rows if r["split"] == split]
        assert len(some) == tiny_speech.epochs * tiny_speech.train.segments
        assert {r["count"] for r in some} == {count}
        assert {r["statistics"] for r in some} == {"running"}
        assert all(0 <= r["fer"] <= 1 for r in some)
    assert rows[-1]["epoch"] == 2
    assert train[-1]["loss"] < 0.8 * train[0]["loss"]  # it learns


def test_a_regularised_network_resumes_to_the_bit(
    tiny_speech: SpeechConfig, tmp_path: Path
) -> None:
    """Validated with running statistics, at the end with both, and evaluated as it was saved."""
    model = replace(
        tiny_speech.model, dropout=0.3, dropout_kind="locked", weight_drop=0.2, zoneout_h=0.1
    )
    config = replace(tiny_speech, model=model)
    out = tmp_path / "whole"
    run_tiny(config, out)
    rows = rows_of(out)
    valid = [r for r in rows if r["split"] == "valid"]
    assert {r["statistics"] for r in valid} == {"running"}
    final = {r["statistics"]: r for r in rows if r["split"] == "best_valid"}
    assert final.keys() == {"running", "recalibrated", "batch"}
    assert final["running"]["loss"] == pytest.approx(min(r["loss"] for r in valid), rel=1e-6)
    (saved,) = (kind for kind, r in final.items() if r["saved"])
    found = {r["statistics"]: r["loss"] for r in evaluate(out)["rows"] if r["split"] == "valid"}
    assert found[saved] == pytest.approx(final[saved]["loss"], rel=1e-6)
    for stop_at in (1, 4):
        with pytest.raises(Interrupted):
            run_tiny(config, tmp_path / "stopped", stop_at)
    assert any("resuming" in line for line in run_tiny(config, tmp_path / "stopped"))
    assert rows_of(tmp_path / "stopped") == rows_of(out)
    best, again = (_load(run).state_dict() for run in (out, tmp_path / "stopped"))
    assert all(torch.equal(best[name], again[name]) for name in best)


def test_training_statistics_travel_with_the_model(whole: Path, speech_dir: Path) -> None:
    model, corpus = _load(whole), read_speech(speech_dir)
    rows = torch.cat([corpus.train.features(i) for i in range(len(corpus.train.keys))]).double()
    torch.testing.assert_close(model.mean.double(), rows.mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        model.variance.double(), rows.var(0, unbiased=False), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(model.label_counts, corpus.label_counts)


def test_long_utterances_are_left_out_and_that_is_said(tiny_speech: SpeechConfig) -> None:
    limited = replace(tiny_speech, train=replace(tiny_speech.train, max_frames=30, piece_frames=0))
    task = SpeechTask.open(limited)
    assert "9 of 12 training utterances" in task.source
    lengths = [task.lengths["train"][i] for batch in task.batches("train") for i in batch]
    assert sorted(lengths) == [5, 7, 9, 12, 16, 18, 22, 25, 28]
    # Three of these, evenly spread: 12 25 7 18 22 9 16 28 5
    assert task.lengths["train_eval"] == [12, 18, 16]
    none_left = replace(tiny_speech, train=replace(tiny_speech.train, max_frames=4))
    with pytest.raises(UserError, match="0 training sequences"):
        SpeechTask.open(none_left)


def test_frame_wise_statistics_need_no_lucky_number_of_utterances(
    tiny_speech: SpeechConfig, tmp_path: Path
) -> None:
    train = replace(tiny_speech.train, batch=11, piece_frames=0)  # 12 utterances: one is left over
    run_tiny(replace(tiny_speech, norm="frame", epochs=1, train=train), tmp_path)
    assert [row["count"] for row in rows_of(tmp_path) if row["split"] == "train"] == [246]
    train = replace(train, batch=2)  # 3 in the development set
    task = SpeechTask(replace(tiny_speech, norm="frame", train=train))
    rows = list(task.rows({"running": _load(tmp_path)}, "valid"))
    assert (rows[-1]["statistics"], rows[-1]["count"]) == ("batch", 66)


@pytest.mark.usefixtures("saved_with_running")
def test_evaluate_under_all_statistics(
    tiny_baseline: SpeechConfig, whole: Path, tmp_path: Path
) -> None:
    result = evaluate(whole)
    kinds = [(r["split"], r["statistics"]) for r in result["rows"]]
    assert kinds == [
        ("valid", "running"),
        ("valid", "recalibrated"),
        ("valid", "batch"),
        ("train_eval", "running"),
    ]
    assert result["same_data"]
    kept = json.loads((whole / "evaluation.json").read_text())
    assert kept.pop("sha256")
    assert kept == result
    best = min(r["loss"] for r in rows_of(whole) if r["split"] == "valid")
    losses = [r["loss"] for r in result["rows"] if r["split"] == "valid"]
    assert losses[0] == pytest.approx(best, rel=1e-6)
    assert len(set(losses)) == 3
    run_tiny(replace(tiny_baseline, epochs=1), tmp_path / "baseline")
    result = evaluate(tmp_path / "baseline")
    assert [r["split"] for r in result["rows"]] == ["valid", "train_eval"]


def test_evaluation_on_other_data_is_of_the_model_as_it_serves(
    tiny_speech: SpeechConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved with recalibrated statistics, it keeps those of its own training set."""
    write_speech(tmp_path / "other", seed=1)
    model = replace(tiny_speech.model, momentum=0.001)  # running statistics hardly learn
    run_tiny(replace(tiny_speech, model=model), tmp_path / "run")
    other = str(tmp_path / "other")
    result = evaluate(tmp_path / "run", other)
    assert not result["same_data"]
    assert result["notes"] == []
    serves, dev = _load(tmp_path / "run"), read_speech(other).dev
    nats = 0.0
    for i in range(len(dev.keys)):
        outputs = serves(pack_sequence([dev.features(i)]))
        nats += F.cross_entropy(outputs, dev.labels(i), reduction="sum").item()
    losses = {r["statistics"]: r["loss"] for r in result["rows"] if r["split"] == "valid"}
    assert losses["recalibrated"] == pytest.approx(nats / sum(dev.lengths), rel=1e-5)
    assert "running" not in losses
    # Saved with running ones, recalibrated ones come from the other data, if any is short enough.
    monkeypatch.setattr("normrnn.engine.loop.better_kind", lambda _: "running")
    run_tiny(tiny_speech, tmp_path / "plain")
    (note,) = evaluate(tmp_path / "plain", other)["notes"]
    assert other in note
    monkeypatch.setattr(SpeechTask, "calibration", lambda _: [])
    result = evaluate(tmp_path / "plain", other)
    kinds = {row["statistics"] for row in result["rows"]}
    assert kinds == {"running", "batch"}
    assert other in result["notes"][0]


def test_posteriors_as_kaldi_reads_them(whole: Path, speech_dir: Path, tmp_path: Path) -> None:
    model, dev = _load(whole), read_speech(speech_dir).dev
    prefix = tmp_path / "out" / "post.dev"
    assert write_posteriors(whole, speech_dir / "dev", prefix) == (3, sum(dev.lengths))
    assert sorted(p.name for p in prefix.parent.iterdir()) == ["post.dev.ark", "post.dev.scp"]
    written = dict(kaldiio.load_scp(f"{prefix}.scp").items())
    assert list(written) == dev.keys
    for i, key in enumerate(dev.keys):
        expected = model(pack_sequence([dev.features(i)])).log_softmax(1).detach().numpy()
        np.testing.assert_allclose(written[key], expected, rtol=1e-5, atol=1e-6)
    write_posteriors(whole, speech_dir / "dev", prefix, floor=2.0)
    scaled = kaldiio.load_scp(f"{prefix}.scp")
    for key in dev.keys:
        priors = np.broadcast_to(model.log_priors(2.0), written[key].shape)
        np.testing.assert_allclose(written[key] - scaled[key], priors, atol=1e-5)


def test_posteriors_on_a_full_disk_keep_both_files_and_never_mix_old_and_new(
    whole: Path, speech_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / "p.ark", tmp_path / "p.scp"]
    write_posteriors(whole, speech_dir / "dev", tmp_path / "p")
    before = [file.read_bytes() for file in files]

    def fsync(descriptor: int) -> None:
        if ".p.scp." in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fsync)
        with pytest.raises(UserError, match="No space left"):
            write_posteriors(whole, speech_dir / "dev", tmp_path / "p", floor=2.0)
    assert [file.read_bytes() for file in files] == before
    replace = Path.replace

    def killed(path: Path, target: Path) -> Path:
        if target == files[1]:
            raise KeyboardInterrupt
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_posteriors(whole, speech_dir / "dev", tmp_path / "p", floor=2.0)
    assert files[0].read_bytes() != before[0]
    assert not files[1].exists()


def test_posteriors_refuse_other_features_and_keep_what_was_there(
    whole: Path, tmp_path: Path
) -> None:
    data = tmp_path / "other"
    data.mkdir()
    with (data / "feats.ark").open("wb") as file:
        offset = write_matrix(file, "a", np.zeros((4, DIM + 1)))
    (data / "feats.scp").write_text(f"a {data / 'feats.ark'}:{offset}\n")
    (tmp_path / "post.ark").write_text("precious")
    with pytest.raises(UserError, match=f"a of .* has {DIM + 1} features a frame"):
        write_posteriors(whole, data, tmp_path / "post")
    assert (tmp_path / "post.ark").read_text() == "precious"
    assert not list(tmp_path.glob(".post*"))


def test_posteriors_verify_and_never_overwrite_what_they_read(
    whole: Path, speech_dir: Path
) -> None:
    before = {path: path.read_bytes() for path in (speech_dir / "dev").iterdir()}
    with pytest.raises(UsageError, match=r"would overwrite .*feats\.ark, which is read"):
        write_posteriors(whole, speech_dir / "dev", speech_dir / "dev" / "feats")
    assert {path: path.read_bytes() for path in (speech_dir / "dev").iterdir()} == before
    archive = speech_dir / "dev" / "feats.ark"
    archive.write_bytes(archive.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=r"feats\.ark is damaged"):
        write_posteriors(whole, speech_dir / "dev", speech_dir / "post")


@pytest.mark.usefixtures("saved_with_running")
@pytest.mark.parametrize(("norm", "kinds"), [("hidden", 3), ("layer", 1)])
def test_norms_inside_the_steps_train_on_ragged_batches(
    tiny_speech: SpeechConfig, tmp_path: Path, norm: str, kinds: int
) -> None:
    """Statistics are shared over time, or there are none and every row would say the same."""
    config = replace(tiny_speech, norm=norm, epochs=1)
    run_tiny(config, tmp_path / "run")
    rows = [row for row in evaluate(tmp_path / "run")["rows"] if row["split"] == "valid"]
    assert len(rows) == len({row["statistics"] for row in rows}) == kinds
    assert all(math.isfinite(row["loss"]) for row in rows)


def test_commands_for_text_refuse_a_speech_run(whole: Path) -> None:
    with pytest.raises(UserError, match="librispeech-mini, not of a language model"):
        RunDirectory(whole).config(LanguageConfig)


def test_test_speakers_are_never_trained_on(tiny_speech: SpeechConfig, tmp_path: Path) -> None:
    evaluation = replace(tiny_speech.evaluation, test_speakers=2)
    config = replace(tiny_speech, recipe="librispeech-mini-small", evaluation=evaluation, epochs=1)
    task = SpeechTask(config)
    tested = {piece.utterance for piece in task.pieces["test"]}
    assert tested == {i for i in range(12) if i % 4 in (0, 2)}
    assert not tested & {p.utterance for s in ("train", "train_eval") for p in task.pieces[s]}
    assert task.sha256 != SpeechTask(tiny_speech).sha256
    run_tiny(config, tmp_path / "run")
    (row, *_) = [r for r in rows_of(tmp_path / "run") if r["split"] == "test"]
    assert row["count"] == sum(piece.length for piece in task.pieces["test"])
    with pytest.raises(UserError, match="test_speakers 4"):
        SpeechTask(replace(config, evaluation=replace(evaluation, test_speakers=4)))
