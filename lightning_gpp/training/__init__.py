"""Training in stages without a framework: from a module and its optimizers to an engine for a loop of one's own."""
