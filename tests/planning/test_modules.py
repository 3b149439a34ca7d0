import pytest

from lightning_gpp.planning.assignment.modules import around, stage_names


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        ([["", "@step"]], ["model"]),
        ([["image_tower"], ["text_tower"], ["head", "@step"]], ["image_tower", "text_tower", "head"]),
        ([["blocks.0", "blocks.1", "blocks.2"], ["blocks.3"]], ["blocks.0-2", "blocks.3"]),
        ([["embed", "blocks.0", "x.y"], ["head"]], ["embed+blocks.0+x.y", "head"]),
        ([["model.h.0"], ["model.lm_head"]], ["h.0", "lm_head"]),
        ([["a"], ["@step"]], ["a", "step"]),
        ([["a.b"], ["c"], ["a.b.d", "a.b.e"], ["a.b.f", "a.b.e"]], ["a.b", "c", "a.b.d+e", "a.b.f+e"]),
        (
            [["text_tower.blocks.0.perceptron_norm", "text_tower.blocks.1.attention_norm"], ["head"]],
            ["text_tower/1", "head"],
        ),
        (
            [
                ["t.0.norm", "t.0.attention.in", "t.0.up"],
                ["t.0.down", "t.1.norm", "t.2.up"],
                ["t.2.down", "t.3", "head"],
            ],
            ["t/1", "t/2", "t.2.down+t.3+head"],
        ),
    ],
)
def test_stage_names(modules: list[list[str]], names: list[str]) -> None:
    assert stage_names(modules) == names


def test_around() -> None:
    assert around(["a.b.c", "d"]) == {"", "a", "a.b"}
