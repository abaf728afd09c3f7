"""Sound and transcripts, or a Kaldi directory, into the features and labels that are trained on."""
