"""Text streams: file -> vocabulary ids -> contiguous streams -> (T, B) windows."""
