"""Sound files as 16-bit samples; Unusable, with the reason, for others."""

import os
import struct
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from normrnn.extras import import_extra
from normrnn.files import largest_unpacked, open_regular
from normrnn.speech.archive import Unusable

SAMPLE_RATE = 16_000
_UNKNOWN_SIZE = 0x7FFFF000  # programs that write to a pipe put this, or more, into a WAV header
_UNKNOWN_FRAMES = 2**63 - 1  # libsndfile's for a header without a length


class Sound(NamedTuple):
    """Mono samples in the range of 16-bit integers."""

    samples: NDArray[np.int16]
    rate: int
    channels: int


def read_sound(source: Path | IO[bytes], rate: int = SAMPLE_RATE) -> Sound:
    """Read a sound at `rate`; other rates are refused, channels are averaged."""
    soundfile = import_extra("soundfile")
    limit = largest_unpacked(_file_size(source))
    try:
        with soundfile.SoundFile(source) as file:
            if file.samplerate != rate:
                raise Unusable(
                    f"its sample rate is {file.samplerate} Hz; {rate} Hz is needed, and nothing is"
                    " resampled here"
                )
            expected, channels = file.frames, file.channels
            if expected == _UNKNOWN_FRAMES:
                raise Unusable("its header has no length: flac writes one when it encodes a file")
            if expected * channels * 2 > limit:
                raise Unusable(f"its file is too small for the {expected:,} samples it declares")
            values = file.read(dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, RuntimeError, OSError) as error:
        raise Unusable(f"its sound cannot be read: {_reason(error)}") from None
    if len(values) < expected:
        raise Unusable(f"its sound is truncated: {len(values):,} of {expected:,} samples")
    if len(values) == 0:
        raise Unusable("its sound is empty")
    if not np.isfinite(values).all():
        raise Unusable("its sound has samples that are not finite")
    mono = values.mean(axis=1) if channels > 1 else values[:, 0]
    samples = np.clip(np.round(mono * 32768.0), -32768, 32767).astype(np.int16)
    check_not_silent(samples)
    return Sound(samples, rate, channels)


def check_not_silent(samples: NDArray[np.int16]) -> None:
    """Raise Unusable for digital silence."""
    if len(samples) and samples.min() == samples.max():
        raise Unusable("it is silent: every sample is the same")


def _file_size(source: Path | IO[bytes]) -> int:
    """Bytes of the file. A WAV file declares them too, and libsndfile does not notice if there are
    fewer: Unusable."""
    if not isinstance(source, Path):
        size = source.seek(0, os.SEEK_END)
        source.seek(0)
        return size
    try:
        with open_regular(source) as file:
            head = file.read(12)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise Unusable(f"its sound cannot be read: {error.strerror}") from None
    if size == 0:
        raise Unusable("its sound file is empty")
    if head[:4] == b"RIFF" and head[8:] == b"WAVE":
        (promised,) = struct.unpack("<I", head[4:8])
        if size + 1 < promised + 8 < _UNKNOWN_SIZE:
            raise Unusable(f"its sound is truncated: {size:,} of {promised + 8:,} bytes")
    return size


def _reason(error: Exception) -> str:
    text = getattr(error, "error_string", None) or str(error)
    return text.strip().rstrip(".")
