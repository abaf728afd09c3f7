"""Sound, and its features as Kaldi computes them (section 5.1)."""

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from normrnn.extras import import_extra
from normrnn.files import open_regular
from normrnn.speech.archive import Unusable

SAMPLE_RATE = 16_000
MEL_BANDS = 40
FRAME_SHIFT = 0.010
FRAME_LENGTH = 0.025
_DELTAS = np.array([-0.2, -0.1, 0.0, 0.1, 0.2])
"""Filter of the first order; that of the second is its convolution with itself."""


def read_sound(path: Path) -> NDArray[np.int16]:
    """Read a FLAC file at 16 kHz, channels averaged; Unusable, with the reason, for others."""
    soundfile = import_extra("soundfile", "speech")
    try:
        with open_regular(path) as raw, soundfile.SoundFile(raw) as file:
            if file.format != "FLAC" or file.samplerate != SAMPLE_RATE:
                raise Unusable(
                    f"its sound is {file.format} at {file.samplerate} Hz; FLAC at {SAMPLE_RATE} Hz"
                    " is needed"
                )
            expected = file.frames
            # Sound compresses to about a tenth: a hundredth is no sound.
            if expected * file.channels * 2 > 100 * os.fstat(raw.fileno()).st_size + (1 << 24):
                raise Unusable(f"its file is too small for the {expected:,} samples it declares")
            values = file.read(dtype="int16", always_2d=True)
    except (soundfile.LibsndfileError, RuntimeError, OSError) as error:
        raise Unusable(f"its sound cannot be read: {error}") from None
    if len(values) < expected or not expected:
        raise Unusable(f"its sound is truncated: {len(values):,} of {expected:,} samples")
    if values.min() == values.max():
        raise Unusable("it is silent: every sample is the same")
    return values[:, 0] if values.shape[1] == 1 else values.mean(axis=1).round().astype(np.int16)


def fbank(samples: NDArray[np.int16]) -> NDArray[np.float32]:
    """(T, 41): log energy, then 40 log-mel bands; 25 ms every 10 ms, only whole frames."""
    knf = import_extra("kaldi_native_fbank", "speech")
    options = knf.FbankOptions()
    options.frame_opts.samp_freq = SAMPLE_RATE
    options.frame_opts.frame_shift_ms = FRAME_SHIFT * 1000
    options.frame_opts.frame_length_ms = FRAME_LENGTH * 1000
    options.frame_opts.snip_edges = True
    options.frame_opts.dither = 0.0
    options.mel_opts.num_bins = MEL_BANDS
    options.use_energy = True
    computer = knf.OnlineFbank(options)
    # Kaldi works on samples in the range of 16-bit integers.
    computer.accept_waveform(SAMPLE_RATE, samples.astype(np.float32))
    computer.input_finished()
    frames = computer.num_frames_ready
    if frames == 0:
        raise Unusable(f"it is shorter than one frame: {len(samples)} samples")
    return np.stack([computer.get_frame(t) for t in range(frames)]).astype(np.float32)


def add_deltas(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """(T, D) -> (T, 3D): the features, their deltas and delta-deltas.

    As Kaldi's `add-deltas`: each order is one filter on the features themselves, whose first and
    last frame are repeated beyond the edges. So delta-deltas are not the deltas of the deltas near
    an edge.

    >>> for row in add_deltas(np.array([[0.0], [0.0], [1.0]], dtype=np.float32)):
    ...     print([f"{value:.2f}" for value in row])
    ['0.00', '0.20', '0.09']
    ['0.00', '0.30', '0.05']
    ['1.00', '0.30', '-0.05']
    """
    steps = len(features)
    orders = [features]
    for scales in (_DELTAS, np.convolve(_DELTAS, _DELTAS)):
        reach = len(scales) // 2
        padded = np.pad(features, ((reach, reach), (0, 0)), mode="edge").astype(np.float64)
        total = sum(scale * padded[at : at + steps] for at, scale in enumerate(scales))
        orders.append(np.asarray(total, dtype=np.float32))
    return np.concatenate(orders, axis=1)
