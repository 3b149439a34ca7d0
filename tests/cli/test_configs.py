"""Every shipped config composes and names things that exist; what does not fit is refused with what would."""

from __future__ import annotations

import inspect
import re

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException

from lightning_gpp.cli.configured import built
from lightning_gpp.cli.job import build
from lightning_gpp.cli.strategy_file import strategy_yaml
from lightning_gpp.cli.told import told
from lightning_gpp.config_files import config_folder
from lightning_gpp.errors import ConfigError
from lightning_gpp.strategy import GPPStrategy
from tests.cli.commands import check_targets, composed

FILES = sorted(str(path.relative_to(config_folder()).with_suffix("")) for path in config_folder().glob("*/*.yaml"))
SET_BY_LIGHTNING = {"parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin", "accelerator"}


@pytest.mark.parametrize("file", FILES)
def test_every_file_composes_and_names_things_that_exist(file: str) -> None:
    group, name = file.split("/")
    base = [] if group == "experiment" else ["experiment=two_tower"]
    config = composed(*base, f"{group}={name}", name="plan" if group == "cluster" else "train")
    check_targets(config)
    assert not GlobalHydra.instance().is_initialized()


def test_the_strategy_file_is_written_from_the_options() -> None:
    text = (config_folder() / "strategy" / "gpp.yaml").read_text()
    assert text == strategy_yaml(), "python -m lightning_gpp.cli.strategy_file writes it again"
    keys = re.findall(r"^# .*\n(\w+):", text, re.MULTILINE)
    assert set(keys) == set(inspect.signature(GPPStrategy).parameters) - SET_BY_LIGHTNING


def test_a_wrong_key_is_refused_at_composition() -> None:
    with pytest.raises(ConfigCompositionException) as caught:
        composed("experiment=two_tower", "strategy.shedule=gpipe")
    assert "strategy.shedule: there is no such key. Did you mean strategy.schedule?" in told(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+strategy.shedule=gpipe", "no option 'shedule'. Did you mean schedule"),
        ("+model.widht=1", r"model \(.*TwoTower\) .*unexpected keyword argument 'widht'"),
        (
            "model._target_=gpp_examples.two_tower.Three",
            r"model \(gpp_examples.two_tower.Three\) cannot be built: ImportError: .*Three",
        ),
    ],
)
def test_what_cannot_be_built_names_its_key(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(composed("experiment=two_tower", override)[override.lstrip("+").partition(".")[0]])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("strategy.schedule=fastest", "strategy.schedule is 'fastest'; it must be one of auto, 1f1b, .*register"),
        ("strategy.num_pipelines=0", "strategy.num_pipelines is 0; it must be greater than or equal to 1"),
    ],
)
def test_an_option_is_refused_before_data_and_model_are_built(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(composed("experiment=two_tower", "~data", "~model", override))
