"""What a trained network is asked about itself."""
