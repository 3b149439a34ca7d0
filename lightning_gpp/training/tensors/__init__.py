"""The tensors of the module that this rank holds, and the ways to those of others."""
