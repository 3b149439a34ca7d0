"""What careless users give the commands: files that are something else, and command lines, with what they are told."""

from __future__ import annotations

from importlib.util import find_spec

_WANDB = (
    r"WandbLogger\) does not work with its settings .*wandb login"
    if find_spec("wandb")
    else r"WandbLogger cannot be built: .*pip install"
)

_STAGES = """version: 1
stages:
- name: a
  modules: [{modules}]
  devices: [1]
  micro_batch_size: 16
- name: b
  modules: ['@step']
  devices: [0]
  micro_batch_size: 16
edges:
- src: 0
  dst: 1
{more}batch_size: 64
schedule: {schedule}
"""

_CODE = """
import torch, lightning as L
from gpp_examples.two_tower import *
class NoStep(L.LightningModule):
    def __init__(self, **_): super().__init__()
class NoOptimizer(TwoTower):
    configure_optimizers = L.LightningModule.configure_optimizers
class Untitled(TwoTower):
    def configure_optimizers(self): return {"optimiser": torch.optim.SGD(self.parameters(), 0.1)}
class Foreign(TwoTower):
    def configure_optimizers(self): return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1)
class Silent(TwoTower):
    def training_step(self, batch, batch_idx): assert len(batch) == 7
class Narrow(TwoTower):
    def training_step(self): pass
def number(**_): return 3
class Images(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): raise FileNotFoundError(2, "No such file or directory", f"{index}.png")
class Missing(CaptionedDigits):
    def train_dataloader(self): return torch.utils.data.DataLoader(Images(), batch_size=2)
class Ragged(CaptionedDigits):
    def train_dataloader(self): return torch.utils.data.DataLoader([torch.zeros(n) for n in (1, 2)], batch_size=2)
"""


def _graph(outputs: str) -> str:
    operator = f'{{"name": "a", "target": "linear", "module": "a", "outputs": [{outputs}]}}'
    return f'{{"operators": [{operator}], "edges": [], {_SIZES}}}'


_SIZES = '"parameter_bytes": {}, "parameter_sizes": {}, "buffer_bytes": {}'

FILES = {
    "wrong.py": _CODE,
    "list.yaml": "- 1\n- 2\n",
    "text.yaml": "just some words\n",
    "tab.yaml": "a:\n\t- b\n",
    "no_link.yaml": "nodes:\n  - {device: t4, count: 4}\n",
    "device.yaml": "nodes:\n  - {device: rtx9000, count: 4, link: {bytes_per_second: 1e9}}\n",
    "slow.yaml": "nodes:\n  - {device: t4, count: 4, link: {bytes_per_second: -5}}\n",
    "typo.yaml": "nodes:\n  - {device: t4, cuont: 4}\n",
    "half.json": '{"operators": [',
    "list.json": "[1, 2]",
    "empty.json": "",
    "nothing.json": "{}",
    "words.json": '{"operators": "many"}',
    "plan9.yaml": "version: 9\nstages: []\n",
    "empty_plan.yaml": "version: 1\nstages: []\nedges: []\nbatch_size: 4\nschedule: 1f1b\n",
    "other.yaml": _STAGES.format(modules="nowhere", more="", schedule="1f1b"),
    "circle.yaml": _STAGES.format(modules="head", more="- src: 1\n  dst: 0\n", schedule="1f1b"),
    "far.yaml": _STAGES.format(modules="head", more="- src: 0\n  dst: 7\n", schedule="1f1b"),
    "odd.yaml": _STAGES.format(modules="head", more="", schedule="fastest"),
    "junk.ckpt": "no checkpoint",
    "empty.ckpt": "",
    "damaged.ckpt": "PK\x03\x04 and no end",
    "number.yaml": "version: 1\nstages:\n- 3\nedges: []\nbatch_size: 64\nschedule: 1f1b\n",
    "alias.yaml": "a: &a [*a]\n",
    "deep.json": "[" * 5000,
    "bytes.json": "\x80\xff\x00",
    "words.yaml": _STAGES.format(modules="head", more="", schedule="1f1b").replace("size: 16", "size: lots"),
    "half.yaml": _STAGES.format(modules="head", more="", schedule="1f1b").replace("size: 16", "size: 1.5"),
    "negative.yaml": _STAGES.format(modules="head", more="", schedule="1f1b").replace("size: 64", "size: -64"),
    "typed.yaml": _STAGES.format(modules="head", more="shedule: gpipe\n", schedule="1f1b"),
    "twice.yaml": _STAGES.format(modules="head", more="batch_size: 32\n", schedule="1f1b"),
    "again.yaml": _STAGES.format(modules="image_tower, text_tower, head", more="", schedule="1f1b").replace(
        "'@step'", "'@step', head"
    ),
    "repeated.yaml": _STAGES.format(modules="head", more="", schedule="1f1b").replace("[0]", "[1, 1]"),
    "alone.yaml": _STAGES.format(modules="head", more="", schedule="1f1b").replace("dst: 1", "dst: 0"),
    "gap.yaml": _STAGES.format(modules="head", more="", schedule="1f1b").replace("[1]", "[5]"),
    "one.yaml": _STAGES.format(modules="head", more="", schedule="1f1b").replace("version: 1", "version: one"),
    "code.yaml": "!!python/object/apply:os.system ['echo']\n",
    "two.yaml": "version: 1\n---\nversion: 1\n",
    "wide.yaml": "\xff\xfea\x00:\x001\x00",
    "nul.yaml": "a\x00b",
    "list_key.yaml": "? [1, 2]\n: 3\n",
    "none_there.yaml": "nodes:\n  - {device: t4, count: 0, link: {bytes_per_second: 1e9}}\n",
    "no_nodes.yaml": "nodes: []\n",
    "named_nodes.yaml": "nodes: [t4, t4]\n",
    "endless.yaml": "nodes:\n  - {device: t4, count: 4, link: {bytes_per_second: .inf}}\n",
    "unlinked.yaml": "nodes:\n  - {device: t4, count: 2, link: {bytes_per_second: 1e9}}\n"
    "  - {device: t4, count: 2, link: {bytes_per_second: 1e9}}\n",
    "marked.json": "\xef\xbb\xbf{}",
    "null.json": "null",
    "nan.json": '{"operators": [{"name": "a", "flops": NaN}]}',
    "one.json": _graph(""),
    "eight.json": _graph('{"shape": [{"per_sample": 1, "fixed": 0}], "dtype": "float33"}'),
    "vast.json": _graph('{"shape": [{"per_sample": 1e30, "fixed": 0}], "dtype": "float32"}'),
    "folder/plan.yaml/file": "",
    "mine/experiment/loop.yaml": "# @package _global_\ndefaults:\n  - loop\n",
    "mine/experiment/lost.yaml": "# @package _global_\ndefaults:\n  - override /data: two_tower\n"
    "  - override /model: two_tower\nmodel:\n  learning_rate: ${nowhere.key}\n",
    "mine/experiment/unset.yaml": "# @package _global_\ndefaults:\n  - override /data: two_tower\n"
    "  - override /model: two_tower\nmodel:\n  learning_rate: ${oc.env:NO_SUCH_VARIABLE}\n",
    "mine/callbacks/mistyped.yaml": "x:\n  _target_: lightning.pytorch.callbacks.EarlyStopping\n  monitr: loss\n",
    "mine/experiment/lame.yaml": "# @package _global_\ndefaults:\n  - override /data: two_tower\n"
    "  - override /model: no_such\n",
    "mine/experiment/broken.yaml": "# @package _global_\ndefaults: [\n",
    "mine/experiment/silent.yaml": "",
}

LINES: dict[str, str] = {
    # arguments that are none
    "gpp-train two_tower": r"'two_tower' is not KEY=VALUE, for example",
    "gpp-train experiment=two_tower =4": r"Config group override must be .* KEY=VALUE, for example",
    "gpp-train experiment=two_tower trainer.devices": r"'trainer.devices' is not KEY=VALUE",
    "gpp-train experiment=two_tower trainer.devices==4": r"'trainer.devices==4' is not KEY=VALUE",
    "gpp-train experiment=two_tower trainer,devices=4": r"'trainer,devices=4' is not KEY=VALUE",
    "gpp-train experiment=two_tower 'model={'": r"'model={' is not KEY=VALUE",
    "gpp-train -experiment=two_tower": r"unrecognized arguments: -experiment=two_tower",
    "gpp-train --experiment two_tower": r"File two_tower does not exist. .* KEY=VALUE",
    "gpp-plan comapre experiment=two_tower": r"'comapre' is not KEY=VALUE",
    # groups and configuration folders
    "gpp-train experiment=": r"experiment",
    "gpp-train data=two_tower": r"You must specify 'model'.* two_tower",
    "gpp-train model=two_tower": r"You must specify 'data'.* two_tower",
    "gpp-train experiment=two_tower callbacks=nope": r"'callbacks/nope' Available options .* run_report",
    "gpp-train --config-dir nowhere experiment=two_tower": r"directory '.*nowhere' not found",
    "gpp-train --config-dir mine.py experiment=two_tower": r"directory '.*mine\.py' not found",
    "gpp-train --config-name nope experiment=two_tower": r"nope",
    "gpp-train --config-dir mine experiment=lame": r"'model/no_such' Available options in 'model': .*two_tower",
    "gpp-train --config-dir mine experiment=broken": r"is not YAML: .*broken\.yaml",
    "gpp-train --config-dir mine experiment=silent": r"You must specify 'model', e\.g",
    "gpp-train experiment=two_tower hydra.run.dir=/proc/x": r"/proc/x: .*hydra\.run\.dir=FOLDER",
    # what Lightning refuses
    "gpp-train experiment=two_tower trainer.devices=0": r"trainer\.devices=0.*not a valid input",
    "gpp-train experiment=two_tower trainer.devices=-2": r"trainer\.devices=-2.*int > 0",
    "gpp-train experiment=two_tower trainer.devices=1.5": r"trainer\.devices=1\.5.*int > 0",
    "gpp-train experiment=two_tower 'trainer.devices=[0,0]'": r"trainer\.devices=\[0, 0\].*int > 0",
    "gpp-train experiment=two_tower trainer.precision=fp8": r"'fp8' is invalid\. Allowed precision values",
    "gpp-train experiment=two_tower trainer.accelerator=gpus": r"accelerator='gpus'.* Available names are: .*cpu",
    "gpp-train experiment=two_tower trainer.gradient_clip_val=high trainer.devices=1": r"`gradient_clip_val` should be",
    # seeds and checkpoints
    "gpp-train experiment=two_tower seed=one": r"seed=one is not a whole number",
    "gpp-train experiment=two_tower seed=-1": r"seed=-1 is not a whole number",
    "gpp-train experiment=two_tower seed=1.5": r"seed=1\.5 is not a whole number",
    "gpp-plan experiment=two_tower seed=one": r"seed=one is not a whole number",
    "gpp-train experiment=two_tower ckpt_path=junk.ckpt": r"ckpt_path=junk\.ckpt is not a checkpoint",
    "gpp-train experiment=two_tower ckpt_path=empty.ckpt": r"ckpt_path=empty\.ckpt is not a checkpoint",
    "gpp-train experiment=two_tower ckpt_path=latin.yaml": r"ckpt_path=latin\.yaml is not a checkpoint",
    # options of the strategy
    "gpp-train experiment=two_tower strategy.schedule=1f2b": r"strategy\.schedule is '1f2b'; it must be one of",
    "gpp-train experiment=two_tower strategy.partitioner=best": r"strategy\.partitioner is 'best'; it must be one of",
    "gpp-train experiment=two_tower strategy.sharding=zero3": r"strategy\.sharding is 'zero3'; it must be one of",
    "gpp-train experiment=two_tower strategy.weights=stashed": r"strategy\.weights='stashed' is not .* Choose one of",
    "gpp-train experiment=two_tower strategy.delayed_devices=2": r"delayed_devices=2 .*strategy\.weights=stash",
    "gpp-train experiment=two_tower strategy.slices=0": r"strategy\.slices is 0",
    "gpp-train experiment=two_tower strategy.timeout=-1": r"strategy\.timeout is .*more than 0 seconds",
    "gpp-train experiment=two_tower strategy.on_nonfinite=panic": r"strategy\.on_nonfinite is 'panic'; it must be one",
    "gpp-plan experiment=two_tower strategy.micro_batch_size=0": r"strategy\.micro_batch_size is 0",
    "gpp-plan experiment=two_tower strategy.num_micro_batches=4 strategy.micro_batch_size=4": r"micro_batches=4 and",
    "gpp-plan experiment=two_tower strategy.num_micro_batches=65": r"65",
    "gpp-plan experiment=two_tower 'strategy.slices=[0,0]'": r"strategy\.slices",
    "gpp-plan experiment=two_tower strategy.num_pipelines=3": r"num_pipelines=3",
    "gpp-plan experiment=two_tower strategy.recompute=nothing": r"strategy\.recompute",
    # stages
    "gpp-plan experiment=two_tower 'strategy.stages={image_tower:0}'": r"strategy\.stages leaves parameters",
    "gpp-plan experiment=two_tower 'strategy.stages=[]'": r"strategy\.stages is empty",
    "gpp-plan experiment=two_tower strategy.stages=5": r"strategy\.stages",
    "gpp-plan experiment=two_tower strategy.stages=list.yaml": r"strategy\.stages",
    "gpp-plan experiment=two_tower 'strategy.stages=[{modules:[head],name:5}]'": r"stages\[0\]\.name is 5; it must be",
    "gpp-plan experiment=two_tower 'strategy.stages=[{modules:[head],devices:[-1]}]'": r"is -1; it must be >= 0",
    # plan files
    "gpp-plan experiment=two_tower strategy.plan=other.yaml trainer.devices=2": r"nowhere",
    "gpp-plan experiment=two_tower strategy.plan=circle.yaml trainer.devices=2": r"circle\.yaml \(strategy\.plan\)",
    "gpp-plan experiment=two_tower strategy.plan=far.yaml trainer.devices=2": r"far\.yaml \(strategy\.plan\).*7",
    "gpp-plan experiment=two_tower strategy.plan=odd.yaml trainer.devices=2": r"made for another model",
    "gpp-plan experiment=two_tower strategy.plan=plan9.yaml": r"plan9\.yaml \(strategy\.plan\).* version is 9",
    "gpp-plan experiment=two_tower strategy.plan=empty_plan.yaml": r"empty_plan\.yaml \(strategy\.plan\)",
    "gpp-plan experiment=two_tower strategy.plan=list.yaml": r"list\.yaml \(strategy\.plan\): the content is \[1, 2\]",
    "gpp-plan experiment=two_tower strategy.plan=tab.yaml": r"tab\.yaml \(strategy\.plan\): is not YAML",
    "gpp-plan experiment=two_tower strategy.plan=3": r"strategy\.plan|3 ",
    # clusters
    "gpp-plan experiment=two_tower cluster=nope": r"'cluster/nope' Available options in 'cluster': cpu_host",
    "gpp-plan experiment=two_tower cluster=dgx_h100 cluster.num_nodes=0": r"cluster\.num_nodes is 0; it must be >= 1",
    "gpp-plan experiment=two_tower cluster=cpu_host cluster.num_devices=many": r"num_devices is 'many'; it must be a",
    "gpp-plan experiment=two_tower strategy.cluster=dgx": r"strategy\.cluster='dgx' .* Did you mean dgx_h",
    "gpp-plan experiment=two_tower strategy.cluster=list.yaml": r"strategy\.cluster=list\.yaml: cluster is \[1, 2\]",
    "gpp-plan experiment=two_tower strategy.cluster=no_link.yaml": r"no_link\.yaml: cluster\.nodes\[0\]\.link is",
    "gpp-plan experiment=two_tower strategy.cluster=device.yaml": r"device\.yaml: .*rtx9000",
    "gpp-plan experiment=two_tower strategy.cluster=slow.yaml": r"slow\.yaml: .*bytes_per_second=-5 must be above 0",
    "gpp-plan experiment=two_tower strategy.cluster=typo.yaml": r"cuont is not a key\. Did you mean count",
    "gpp-plan experiment=two_tower strategy.cluster=text.yaml": r"cluster is 'just some words'; it must be a mapping",
    # graph files
    "gpp-plan graph=half.json cluster=summit batch_size=8": r"half\.json: is not JSON",
    "gpp-plan graph=list.json cluster=summit batch_size=8": r"list\.json",
    "gpp-plan graph=empty.json cluster=summit batch_size=8": r"empty\.json: is not JSON",
    "gpp-plan graph=nothing.json cluster=summit batch_size=8": r"nothing\.json",
    "gpp-plan graph=words.json cluster=summit batch_size=8": r"words\.json",
    "gpp-plan graph=none.json cluster=summit batch_size=8": r"none\.json: cannot be read: No such file",
    "gpp-plan graph=eight.json batch_size=8 cluster=summit": r"outputs\[0\]\.dtype is 'float33'; it must be one of",
    "gpp-plan graph=vast.json batch_size=8 cluster=summit": r"\[0\]\.shape has 4e\+30 bytes; no tensor has so many",
    "gpp-plan graph=one.json batch_size=8 strategy.search_seconds=abc": r"^gpp-plan: Error merging override strategy",
    "gpp-plan graph=half.json": r"half\.json: is not JSON",
    "gpp-plan graph=missing.json": r"graph=missing\.json: cannot be read: No such file",
    "gpp-plan graph=one.json batch_size=8": r"trainer\.devices=auto: .* name a cluster",
    "gpp-plan graph=one.json cluster=summit": r"batch_size=None: a graph from a file comes without data\. Give",
    "gpp-train experiment=two_tower 'hydra.run.dir=${oc.env:NO_SUCH}'": r"hydra\.run\.dir: .* Give it a value",
    "gpp-plan graph=nothing.json cluster=summit batch_size=none": r"batch_size|nothing\.json",
    # what gpp-plan is asked for
    "gpp-plan experiment=two_tower batch_size=64": r"batch_size",
    "gpp-plan experiment=two_tower step=train_step": r"train_step",
    "gpp-plan experiment=two_tower schedules=all": r"schedules=all is for gpp-plan compare",
    "gpp-plan experiment=two_tower strategy=ddp": r"gpp-plan plans for strategy=gpp, not for DDPStrategy",
    "gpp-plan experiment=two_tower trainer.devices=auto": r"trainer\.devices=auto: .* for example trainer\.devices=4",
    "gpp-plan compare experiment=two_tower 'schedules=[nope]'": r"nope",
    "gpp-plan compare experiment=two_tower 'partitioners=[nope]'": r"nope",
    "gpp-plan experiment=two_tower output=.": r"output=\. cannot be written: Is a directory",
    "gpp-plan experiment=two_tower report=/proc/report.html": r"report=/proc/report\.html cannot be written",
    "gpp-plan experiment=two_tower trace=mine.py/trace.json": r"trace=mine\.py/trace\.json cannot be written",
    "gpp-plan experiment=two_tower svg=/dev/full strategy.search_seconds=0.5": r"svg=/dev/full cannot be written: No",
    "gpp-plan compare experiment=two_tower schedules=5": r"'5' in schedules does not exist\. Choose all, or some of",
    # values of another type, and what the user's own objects refuse before the first step
    "gpp-plan experiment=gpt_text model.num_heads=7": r"one device, too, .* RuntimeError: shape .*\.py:\d+",
    "gpp-train experiment=two_tower callbacks.model_checkpoint.mode=sideways trainer.devices=1": r"mode=sideways.*can",
    "gpp-train experiment=two_tower ckpt_path=damaged.ckpt": r"ckpt_path=damaged\.ckpt is not a checkpoint",
    "gpp-train experiment=two_tower train=maybe": r"train is 'maybe'; it must be true or false",
    "gpp-plan experiment=two_tower trainer.devices=100000000": r"are 100000000 devices; a cluster has at most 131072",
    "gpp-plan experiment=two_tower trainer.devices=\u2464": r"is not KEY=VALUE",
    "gpp-train experiment=two_tower data._target_=torch.nn.Identity trainer.devices=1": r"Identity is no LightningData",
    "gpp-train experiment=two_tower callbacks=early_stopping trainer.devices=1": r"callbacks\.model_checkpoint has no",
    "gpp-plan experiment=two_tower model=null": r"Config group override must be a string",
    "gpp-plan graph=5 cluster=summit batch_size=8": r"graph is 5; it must be text",
    "gpp-plan graph=deep.json cluster=summit batch_size=8": r"deep\.json: is not JSON",
    "gpp-plan graph=bytes.json cluster=summit batch_size=8": r"bytes\.json: is not text",
    "gpp-plan experiment=two_tower strategy.plan=number.yaml": r"stages\[0\] is 3; it must be a mapping",
    "gpp-plan experiment=two_tower strategy.plan=alias.yaml": r"alias\.yaml \(strategy\.plan\): .* has an alias",
    "gpp-plan experiment=two_tower strategy.memory_headroom=2": r"memory_headroom is 2\.0; it must be 0 or more",
    "gpp-plan experiment=two_tower strategy.search_seconds=forever": r"'forever' .* could not be converted to Float",
    "gpp-plan experiment=two_tower strategy.recompute=[nowhere]": r"strategy\.recompute lists \['nowhere'\]",
    "gpp-plan experiment=two_tower trainer.precision=7-bit": r"refuses trainer\.precision=7-bit: .* Allowed precision",
    "gpp-plan experiment=two_tower trainer.accelerator=quantum": r"trainer\.accelerator=quantum: plans are made for",
    "gpp-plan compare experiment=two_tower partitioners=5": r"5.*partitioner",
    "gpp-train experiment=two_tower trainer.devices=1 +callbacks.extra=5": r"callbacks\.extra=5 describes no object",
    "gpp-train experiment=two_tower trainer.devices=1 '+logger.extra={_target_: torch.nn.Identity}'": r"is no Logger",
    "gpp-train experiment=two_tower trainer.devices=1 '+callbacks.extra={_target_: torch.nn.Identity}'": r"no Callback",
    "gpp-plan experiment=two_tower strategy.simplicity=-1": r"strategy\.simplicity is -1\.0; it must be 0 or more",
    "gpp-plan experiment=two_tower strategy.weights=stash 'strategy.weight_options={nope: 1}'": r"stash knows \['vert",
    # files of plans, clusters and graphs with wrong types, keys and encodings
    "gpp-plan experiment=two_tower strategy.plan=words.yaml": r"stages\[0\]\.micro_batch_size is 'lots'; it must be a",
    "gpp-plan experiment=two_tower strategy.plan=half.yaml": r"stages\[0\]\.micro_batch_size is 1\.5; it must be a who",
    "gpp-plan experiment=two_tower strategy.plan=negative.yaml": r"batch_size is -64; it must be at least 1 sample",
    "gpp-plan experiment=two_tower strategy.plan=typed.yaml": r"shedule is not a key\. Did you mean schedule",
    "gpp-plan experiment=two_tower strategy.plan=twice.yaml": r"twice\.yaml .*: the key 'batch_size' is there twice in",
    "gpp-plan experiment=two_tower strategy.plan=again.yaml trainer.devices=2": r"Module 'head' is listed by two",
    "gpp-plan experiment=two_tower strategy.plan=repeated.yaml": r"devices must be a non-empty list without repeats",
    "gpp-plan experiment=two_tower strategy.plan=alone.yaml": r"stage graph has a cycle: a -> a\. Merge",
    "gpp-plan experiment=two_tower strategy.plan=gap.yaml": r"Devices must be numbered 0\.\.n-1 without gaps",
    "gpp-plan experiment=two_tower strategy.plan=one.yaml": r"version is 'one'; it must be 1",
    "gpp-plan experiment=two_tower strategy.plan=code.yaml": r"is not YAML that can be read: could not determine a con",
    "gpp-plan experiment=two_tower strategy.plan=two.yaml": r"expected a single document in the stream",
    "gpp-plan experiment=two_tower strategy.plan=wide.yaml": r"is not text in UTF-8, see byte 0\. Save it in this enc",
    "gpp-plan experiment=two_tower strategy.plan=nul.yaml": r"control characters are not allowed in position 1",
    "gpp-plan experiment=two_tower strategy.plan=list_key.yaml": r"found unhashable key in line 1",
    "gpp-plan experiment=two_tower strategy.plan=folder/plan.yaml": r"folder/plan\.yaml .* cannot be read: Is a direct",
    "gpp-plan experiment=two_tower strategy.cluster=none_there.yaml": r"nodes\[0\]\.count is 0; it must be >= 1",
    "gpp-plan experiment=two_tower strategy.cluster=no_nodes.yaml": r"cluster\.nodes is \[\]; it must be a list of at",
    "gpp-plan experiment=two_tower strategy.cluster=named_nodes.yaml": r"cluster\.nodes\[0\] is 't4'; it must be a map",
    "gpp-plan experiment=two_tower strategy.cluster=endless.yaml": r"bytes_per_second is inf; it must be a finite numb",
    "gpp-plan experiment=two_tower strategy.cluster=unlinked.yaml trainer.devices=8": r"no link joins device 0 to devi",
    "gpp-plan experiment=two_tower strategy.cluster=folder": r"'folder' is neither the name of a cluster nor a YAML fi",
    "gpp-plan experiment=two_tower strategy.cluster=wide.yaml": r"cluster=wide\.yaml: is not text in UTF-8",
    "gpp-plan graph=marked.json cluster=summit batch_size=8": r"marked\.json: no known kind of operator graph",
    "gpp-plan graph=null.json cluster=summit batch_size=8": r"the content is None; it must be an object",
    "gpp-plan graph=nan.json cluster=summit batch_size=8": r"operators\[0\]\.flops is nan; it must be",
    "gpp-plan graph=folder cluster=summit batch_size=8": r"graph=folder: cannot be read: Is a directory",
    "gpp-plan graph=/dev/null cluster=summit batch_size=8": r"graph=/dev/null: is not JSON",
    # configuration files that refer to what is not there, and keys that nothing reads
    "gpp-plan --config-dir mine experiment=loop": r"A configuration file is in its own list of defaults",
    "gpp-plan experiment=two_tower optimizer=sgd": r"optimizer=sgd is for a graph from a file",
    "gpp-plan experiment=two_tower model.width=???": r"Missing mandatory value: model\.width",
    "gpp-plan experiment=two_tower cluster.num_nodes=2": r"'cluster' has no keys, as none of its files is chosen: clus",
    "gpp-plan experiment=two_tower cluster=summit cluster.num_nodes=1.5": r"cluster\.num_nodes is 1\.5; it must be a w",
    "gpp-plan experiment=two_tower output=plan.yaml report=plan.yaml": r"report=plan\.yaml is the file of output, too",
    "gpp-train experiment=two_tower seed=1,2": r"Ambiguous value for argument 'seed=1,2'",
    # numbers that Lightning computes with before it checks them
    "gpp-train experiment=two_tower trainer.max_epochs=-5": r"Lightning refuses trainer\.max_epochs=-5: ",
    "gpp-train experiment=two_tower trainer.limit_train_batches=1.5": r"Lightning refuses trainer\.limit_train_batches",
    # objects of the user's that lack something, or return something else
    "gpp-plan experiment=two_tower model._target_=wrong.NoStep": r"NoStep has no method training_step, which step=tr",
    "gpp-plan experiment=two_tower model._target_=wrong.NoOptimizer": r"NoOptimizer has no method configure_optimizers",
    "gpp-plan experiment=two_tower model._target_=wrong.Foreign": r"a parameter of shape \(2, 2\) that is not one of t",
    "gpp-plan experiment=two_tower model._target_=wrong.Silent": r"AssertionError",
    "gpp-plan experiment=two_tower model._target_=wrong.Narrow": r"Narrow\.training_step\(",
    "gpp-plan experiment=two_tower model._target_=wrong.number": r"model\._target_=wrong\.number is no LightningModule",
    "gpp-plan experiment=two_tower data._target_=wrong.Ragged": r"The data cannot make their first mini-batch: Runtime",
    "gpp-plan experiment=two_tower data._target_=wrong.Missing": r"cannot make their first mini-batch: FileNotFoundErr",
    "gpp-train experiment=two_tower data._target_=wrong.Missing trainer.devices=1": r"gpp-train: The data cannot make",
    "gpp-train experiment=two_tower strategy._target_=lightning.pytorch.DDPS": r"imported: .*DDPS",
    "gpp-train experiment=two_tower trainer.num_nodes=0": r"Lightning refuses trainer\.num_nodes=0: .*positive",
    "gpp-train --config-dir mine experiment=lost": r"Interpolation key 'nowhere\.key' not found\. Give it a value",
    "gpp-train --config-dir mine experiment=two_tower callbacks=mistyped": r"callbacks\.x .*\(monitr=loss\): TypeError",
    "gpp-plan experiment=two_tower ~trainer.devices": r"no key 'trainer\.devices'\. .*write \+trainer\.devices=VALUE",
    "gpp-train experiment=two_tower seed=${nowhere}": r"seed: Interpolation key 'nowhere' not found\. Give it a value",
    # the other commands
    "gpp-init torch": r"'torch' is the name of an installed package",
    "gpp-checkpoint show damaged.ckpt": r"damaged\.ckpt is not a checkpoint that can be read",
    "gpp-checkpoint": r"usage: gpp-checkpoint",
    "gpp-checkpoint show": r"arguments are required",
    "gpp-checkpoint display junk.ckpt": r"invalid choice: 'display'",
    "gpp-checkpoint show none.ckpt": r"none\.ckpt does not exist",
    "gpp-checkpoint show junk.ckpt": r"junk\.ckpt is not a checkpoint that can be read",
    "gpp-checkpoint show empty.ckpt": r"empty\.ckpt is not a checkpoint that can be read",
    "gpp-checkpoint show deep": r"deep",
    "gpp-checkpoint convert none.ckpt new.ckpt": r"none\.ckpt does not exist",
    "gpp-checkpoint convert junk.ckpt new.ckpt": r"junk\.ckpt is not a checkpoint",
    "gpp-checkpoint convert junk.ckpt": r"arguments are required",
    "gpp-checkpoint convert junk.ckpt junk.ckpt": r"junk\.ckpt",
    "gpp-init": r"arguments are required",
    "gpp-init my-project": r"my-project.* cannot be the name of a Python package",
    "gpp-init n\u00fctzlich": r"cannot be the name of a Python package and of an experiment",
    "gpp-init class": r"class.* cannot be the name of a Python package",
    "gpp-init deep": r"deep exists already",
    "gpp-init a b": r"unrecognized arguments: b",
}
"""Command lines, with patterns of what they say."""
