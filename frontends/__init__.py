"""Frontends: a TensorFlow graph, a file or a generator -> TrainingGraph."""
