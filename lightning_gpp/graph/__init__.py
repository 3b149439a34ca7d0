from lightning_gpp.graph.operator_graph import Affine, Operator, OperatorGraph, TensorSpec

__all__ = ["Affine", "Operator", "OperatorGraph", "TensorSpec"]
