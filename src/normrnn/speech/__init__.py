"""Acoustic models: prepared features and alignments, ragged batches, a network, its outputs."""
