"""What asynchrony does to the loss: weight policies at the delays of pipelines, on one device."""
