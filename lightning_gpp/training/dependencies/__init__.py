"""Values that the captures of a run depend on: attributes, variables, and tensors that forwards make."""
