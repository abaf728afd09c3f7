"""Language models: text, ids, windows, a network, its evaluation and what it writes."""
