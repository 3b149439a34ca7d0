from dataclasses import replace

import pytest

from lightning_gpp.planning import manual
from lightning_gpp.reports import graph_text, plan_table
from lightning_gpp.reports.units import count, duration, percent, rate, size
from tests.planning import graphs

PLAN = manual(
    graphs.two_towers(num_blocks=1),
    [
        {"modules": ["image_tower"], "devices": [1, 2], "micro_batch_size": 8},
        {"modules": ["text_tower"], "devices": [3]},
        {"modules": ["head"], "devices": [0]},
    ],
    batch_size=16,
    micro_batch_size=4,
)

TABLE = """\
| stage         | modules     | devices | samples | parameters | FLOPs | activations | in flight |
|---------------|-------------|---------|---------|------------|-------|-------------|-----------|
| 0 image_tower | image_tower |     1,2 |       8 |      4.09k |    8M |       8 KiB |         2 |
| 1 text_tower  | text_tower  |       3 |       4 |      4.09k |    4M |       4 KiB |         2 |
| 2 head        | head, @step |       0 |       4 |        819 |  800k |       4 KiB |         1 |

3 stages on 4 devices, depth 2, schedule 1f1b, mini-batch of 16 samples in 2/4 micro-batches"""


def test_devices_of_several_processes() -> None:
    first, *others = PLAN.stages
    text = plan_table(replace(PLAN, stages=(replace(first, tensor_parallel_size=2), *others)))
    assert "1,2 (2 processes)" in text
    assert f"{PLAN.num_devices} devices (6 processes), depth" in text


def test_table_is_markdown_and_lines_up() -> None:
    assert plan_table(PLAN) == TABLE


def test_long_lists_of_modules_are_cut() -> None:
    plan = manual(graphs.chain(30), {f"blocks.{i}": int(i > 20) for i in range(30)}, batch_size=4)
    assert "| blocks.0, ..., blocks.20 (21 modules) " in plan_table(plan)


def test_artificial_edges_are_marked() -> None:
    assert "image_tower -> text_tower: order only" in graph_text(PLAN.chained())


def test_whole_model_has_a_name() -> None:
    assert "(whole model), @step" in plan_table(manual(graphs.chain(), {"": 0}, batch_size=4))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (count(0), "0"),
        (count(999.7), "1k"),
        (count(1_234_567), "1.23M"),
        (size(1000), "0.977 KiB"),
        (duration(0.0021), "2.1 ms"),
        (duration(0), "0 s"),
        (percent(0.256), "26 %"),
        (rate(2399.2), "2399"),
        (rate(25243.7), "25240"),
    ],
)
def test_human_numbers(text: str, expected: str) -> None:
    assert text == expected
