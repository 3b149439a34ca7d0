"""Operator graphs of small model families, as capture would record them."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpp.graph import Affine, Operator, OperatorGraph, TensorSpec


class Builder:
    """Records operators one after another, like calls in a forward."""

    def __init__(self) -> None:
        self.graph = OperatorGraph()

    def call(
        self,
        module: str,
        *inputs: str,
        target: str = "call",
        width: int = 64,
        flops: float = 0.0,
        parameters: Sequence[str] = (),
        dtype: str = "float32",
        grad: bool = True,
        random: bool = False,
        cluster: str = "",
    ) -> str:
        name = f"op{len(self.graph)}"
        spec = TensorSpec(shape=(Affine(1), Affine(0, width)), dtype=dtype, requires_grad=grad)
        self.graph.add(
            Operator(
                name=name,
                target=target,
                module=module,
                parameters=tuple(parameters),
                outputs=(spec,),
                flops=Affine(flops),
                saved_bytes=Affine(4.0 * width),
                random=random,
                cluster=cluster,
            )
        )
        for source in inputs:
            self.graph.connect(source, name, 0)
        return name

    def data(self, width: int = 64, dtype: str = "float32") -> str:
        return self.call("@source", target="input", width=width, dtype=dtype, grad=False)

    def linear(
        self, module: str, *inputs: str, width: int = 64, work: float = 1.0, parameter: str = "", cluster: str = ""
    ) -> str:
        """A module with one parameter and `work` million FLOPs per sample."""
        name = parameter or f"{module}.weight"
        self.graph.parameter_sizes[name] = int(width * width * work)
        self.graph.parameter_bytes[name] = 4 * self.graph.parameter_sizes[name]
        return self.call(module, *inputs, width=width, flops=1e6 * work, parameters=[name], cluster=cluster)

    def block(self, module: str, x: str, work: float = 1.0) -> str:
        """attention and mlp with residual sums: two parametrised submodules and glue of the block itself."""
        x = self.call(module, x, self.linear(f"{module}.attn", x, work=work / 3))
        return self.call(module, x, self.linear(f"{module}.mlp", x, work=2 * work / 3))

    def step(self, *inputs: str) -> OperatorGraph:
        self.call("@step", *inputs, target="step")
        return self.graph


def chain(num_blocks: int = 8, work: float = 1.0) -> OperatorGraph:
    build = Builder()
    x = build.data()
    for index in range(num_blocks):
        x = build.linear(f"blocks.{index}", x, work=work)
    return build.step(x)


def two_towers(num_blocks: int = 4, right: int | None = None) -> OperatorGraph:
    build = Builder()
    image, text = build.data(), build.data(dtype="int64")
    for index in range(num_blocks):
        image = build.block(f"image_tower.blocks.{index}", image)
    for index in range(num_blocks if right is None else right):
        text = build.block(f"text_tower.blocks.{index}", text)
    joint = build.call("", image, text, width=128)
    return build.step(build.linear("head", joint, work=0.2))


def feature_towers(num_towers: int = 3, num_layers: int = 2, trunk: int = 2) -> OperatorGraph:
    build = Builder()
    outputs = []
    for tower in range(num_towers):
        x = build.data()
        for layer in range(num_layers):
            x = build.linear(f"towers.{tower}.{2 * layer}", x)
            x = build.call(f"towers.{tower}.{2 * layer + 1}", x)
        outputs.append(x)
    x = build.call("", *outputs, width=64 * num_towers)
    for layer in range(trunk):
        x = build.linear(f"trunk.{layer}", x)
    return build.step(x)


def encoder_decoder(num_layers: int = 4) -> OperatorGraph:
    """Every decoder layer reads the encoder's result."""
    build = Builder()
    source, target = build.data(), build.data()
    for index in range(num_layers):
        source = build.block(f"encoder.layers.{index}", source)
    for index in range(num_layers):
        target = build.call(f"decoder.layers.{index}", target, build.linear(f"decoder.layers.{index}.self", target))
        target = build.linear(f"decoder.layers.{index}.cross", target, source)
    return build.step(build.linear("head", target, work=0.5))


def unet(depth: int = 3) -> OperatorGraph:
    build = Builder()
    x, skips = build.data(), []
    for level in range(depth):
        x = build.linear(f"down.{level}", x)
        skips.append(x)
        x = build.call("pool", x, width=32)
    x = build.linear("middle", x)
    for level in reversed(range(depth)):
        x = build.call("", x, skips[level], width=128)
        x = build.linear(f"up.{level}", x)
    return build.step(x)


def gpt(num_blocks: int = 6) -> OperatorGraph:
    """Tied embedding and head; a mask made once by the root and read by every block."""
    build = Builder()
    tokens = build.data(dtype="int64")
    mask = build.call("transformer", tokens, dtype="bool", grad=False)
    x = build.linear("transformer.wte", tokens, work=0.1)
    x = build.call("transformer.drop", x, random=True)
    for index in range(num_blocks):
        x = build.call(f"transformer.h.{index}", x, build.linear(f"transformer.h.{index}.attn", x, mask))
        x = build.call(f"transformer.h.{index}", x, build.linear(f"transformer.h.{index}.mlp", x, work=2))
    return build.step(build.linear("lm_head", x, parameter="transformer.wte.weight"))


def shared_block(num_calls: int = 3) -> OperatorGraph:
    """One module called between others, again and again: its operators are in the way of cutting between them."""
    build = Builder()
    x = build.data()
    for index in range(num_calls):
        x = build.linear("shared", build.linear(f"layers.{index}", x))
    return build.step(build.linear("head", x))
