from lightning_gpp.graph import Operator, OperatorGraph
from lightning_gpp.planning.assignment.assign import assign, crossing, forced
from tests.planning.graphs import Builder, gpt


def residual_stream(num_layers: int) -> tuple[OperatorGraph, list[str]]:
    build = Builder()
    x, sums = build.data(), []
    x = build.linear("stem", x)
    for index in range(num_layers):
        x = build.call("", x, build.linear(f"layers.{index}", x))
        sums.append(x)
    return build.step(build.linear("head", x)), sums


def test_residual_sums_are_made_where_their_last_summand_is() -> None:
    graph, sums = residual_stream(3)
    modules = [("stem",), ("layers.0",), ("layers.1",), ("layers.2",), ("head", "@step")]
    assignment = assign(graph, modules)
    assert [assignment[name] for name in sums] == [(1,), (2,), (3,)]
    assert sorted(crossing(graph, assignment)) == [(-1, 0), (0, 1), (1, 2), (2, 3), (3, 4)]


def test_masks_made_of_data_are_made_by_each_reader() -> None:
    graph = gpt(num_blocks=2)
    mask = next(operator.name for operator in graph if operator.outputs[0].dtype == "bool")
    modules = [("transformer.wte",), ("transformer.h.0",), ("transformer.h.1",), ("lm_head", "@step")]
    assert assign(graph, modules)[mask] == (1, 2)


def test_random_glue_is_never_repeated() -> None:
    build = Builder()
    noise = build.call("", build.data(), random=True)
    left, right = build.linear("left", noise), build.linear("right", noise)
    graph = build.step(build.linear("head", left, right))
    assert assign(graph, [("left",), ("right",), ("head", "@step")])[noise] == (0,)
    assert forced(graph, [("left",), ("right",), ("head", "@step")]) == {(0, 2), (1, 2)}


def test_glue_that_makes_fewer_bytes_stays_with_its_maker() -> None:
    build = Builder()
    x = build.linear("tower", build.data(), width=256)
    first = build.call("", x, width=256)
    pooled = build.call("", first, width=16)
    graph = build.step(build.linear("head", pooled, width=16))
    assignment = assign(graph, [("tower",), ("head", "@step")])
    assert assignment[first] == assignment[pooled] == (0,)


def test_a_cluster_follows_the_module_that_holds_one_of_its_operators() -> None:
    build = Builder()
    inside = build.linear("left", build.data(), cluster="view")
    outside = build.call("", inside, cluster="view")
    graph = build.step(build.linear("right", outside))
    assignment = assign(graph, [("left",), ("right", "@step")])
    assert assignment[inside] == assignment[outside] == (0,)


def test_a_slice_of_a_buffer_that_nothing_reads_has_a_stage() -> None:
    build = Builder()
    x = build.linear("left", build.data())
    build.graph.add(Operator(name="unread", target="__getitem__", module="", buffers=("table",)))
    graph = build.step(build.linear("right", x))
    assert assign(graph, [("left",), ("right", "@step")])["unread"] == (1,)
    assert assign(graph, [("left",), ("right",)])["unread"] == (0,)
