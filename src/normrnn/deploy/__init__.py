"""A trained network for elsewhere: exports, the cards that go with them, and streams."""
