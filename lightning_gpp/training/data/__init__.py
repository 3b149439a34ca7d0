"""Mini-batches on their way from the loader to the stages."""
