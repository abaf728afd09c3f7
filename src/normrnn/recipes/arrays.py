"""Any sequences of numbers, and three standard problems on them."""

from dataclasses import replace

from normrnn.arrays.config import ArrayConfig, ArrayModelConfig, ArraysConfig
from normrnn.config.base import LoopConfig, OptimizerConfig


def arrays() -> ArrayConfig:
    """Sequences of your own in a .npz file: classes or values, per sequence or per step."""
    return ArrayConfig(recipe="arrays")


def adding() -> ArrayConfig:
    """The adding problem, generated: the sum of two marked values."""
    return ArrayConfig(
        recipe="adding", data="generated:adding", arrays=ArraysConfig(source="adding"), epochs=20
    )


def sequential_mnist() -> ArrayConfig:
    """MNIST pixel by pixel; --data is a directory with the four idx files."""
    return ArrayConfig(
        recipe="sequential-mnist",
        epochs=5,
        arrays=ArraysConfig(source="mnist", valid=1 / 12),
        model=ArrayModelConfig(hidden=100),
        optimizer=OptimizerConfig(name="rmsprop", lr=1e-3, clip_norm=1.0, loss="mean"),
        train=LoopConfig(batch=64, segments=2),
    )


def permuted_mnist() -> ArrayConfig:
    """MNIST pixel by pixel in a fixed random order; --data as for sequential-mnist."""
    plain = sequential_mnist()
    return replace(
        plain,
        recipe="permuted-mnist",
        arrays=replace(plain.arrays, source="permuted-mnist"),
    )
