"""Training in stages without a framework: makes an engine for your own loop from a module and its optimizers."""
