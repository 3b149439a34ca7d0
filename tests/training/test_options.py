"""An option is defined once: arguments, their documentation, types of the configuration and checks follow from it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

import pytest

from lightning_gpp import ConfigError, GPPStrategy
from lightning_gpp.cluster import preset_cluster
from lightning_gpp.option import options_of
from lightning_gpp.training.options import Options


def test_every_field_is_an_option_with_a_help_text_and_a_default_that_it_accepts() -> None:
    options = options_of(Options)
    assert {definition.name for definition in options} == {field.name for field in fields(Options)}
    for definition in options:
        assert definition.help.endswith(".")
        definition.keep(definition.default)


def test_options_are_the_arguments_of_the_strategy_and_stand_in_its_documentation() -> None:
    parameters = inspect.signature(GPPStrategy).parameters
    for definition in options_of(Options):
        assert parameters[definition.name].default == definition.default
        assert f"    {definition.name}: {definition.help.split()[0]}" in str(GPPStrategy.__doc__)
    assert parameters["timeout"].annotation == float | timedelta
    assert parameters["schedule"].kind is inspect.Parameter.KEYWORD_ONLY


def test_what_is_given_is_kept_in_one_form() -> None:
    options = GPPStrategy(timeout=5, failure_timeout=timedelta(seconds=7), cluster={"preset": "summit"}).options
    assert (options.timeout, options.failure_timeout) == (timedelta(seconds=5), timedelta(seconds=7))
    assert options.cluster == preset_cluster("summit")
    assert replace(options, schedule="gpipe").timeout == timedelta(seconds=5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trace": "yes"}, "strategy.trace is 'yes'; it must be true or false"),
        ({"seed": 1.5}, "strategy.seed is 1.5; it must be a whole number"),
        ({"plan": 3}, "strategy.plan is 3; it must be a Plan, the path of a saved one, or null"),
        ({"stages": 3}, "strategy.stages is 3; it must be a mapping such as {encoder: 0, d"),
        ({"cluster": 3}, "strategy.cluster='3' is neither the name of a cluster nor a YAML file"),
        ({"partitioner": ["auto"]}, r"strategy.partitioner is \['auto'\]; it must be one of auto, "),
        ({"search_seconds": float("nan")}, "strategy.search_seconds is nan; it must be more than 0 seconds"),
        ({"failure_timeout": float("inf")}, "strategy.failure_timeout is inf; .* at most a year"),
        ({"recompute": "x" * 1000}, r"strategy.recompute is 'x{30,50}\.\.\.x+'; it must be true, false, a list"),
    ],
)
def test_a_wrong_value_is_refused_with_the_key_and_what_is_allowed(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GPPStrategy(**settings)


def test_names_that_are_close() -> None:
    with pytest.raises(ConfigError, match=r"has added\)\. Did you mean 1f1b\?"):
        GPPStrategy(schedule="1F1B")
    with pytest.raises(ConfigError, match=r"Did you mean pipedream\?"):
        GPPStrategy(partitioner="pipe_dream")


def test_a_partitioner_beside_stages() -> None:
    with pytest.raises(
        ConfigError, match=r"partitioner='pipedream' does not go together with strategy\.stages: it finds"
    ):
        GPPStrategy(stages={"a": 0, "b": 1}, partitioner="pipedream")


def test_an_argument_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"GPPStrategy has no option 'shedule'\. Did you mean schedule"):
        GPPStrategy(shedule="gpipe")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="Did you mean num_micro_batches"):
        GPPStrategy(num_microbatches=4)  # type: ignore[call-arg]


def test_options_load_neither_torch_nor_lightning_nor_hydra() -> None:
    code = "import sys, lightning_gpp.training.options; print({'torch', 'lightning', 'hydra'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert found.strip() == "set()"
