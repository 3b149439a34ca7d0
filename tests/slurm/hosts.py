"""Hosts on one machine: each has a network address, a host name, a file of host names and processes of its own.

The first host has the bridge that joins them. Nothing reaches the machine's own network, and the kernel removes all of
it when the first process of each host ends, which is no later than the end of this process.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

TOOLS = ("unshare", "nsenter", "setpriv", "ip")
NETWORK = "198.18.77"
"""198.18.0.0/15 is reserved for benchmarks of networks."""
_INIT = 'hostname "$0" && mount --bind "$1" /etc/hosts && ip link set lo up && { sleep infinity & wait; }'
"""The first process of a host. The shell also waits for processes whose parents have ended."""


def why_impossible() -> str:
    """The reason why this machine cannot have hosts; empty if it can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    isolated = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "true"]
    return "" if subprocess.run(isolated, capture_output=True).returncode == 0 else "needs root, to make namespaces"


class Hosts:
    """Hosts of these names, from `__enter__` to `__exit__`; `folder` is for files."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self.names = list(names)
        self._file = folder / "hosts"
        self._inits: dict[str, int] = {}
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Hosts:
        lines = ["127.0.0.1 localhost", *(f"{self.address(name)} {name}" for name in self.names)]
        self._file.write_text("\n".join(lines) + "\n")
        with ExitStack() as failed:
            failed.callback(self.__exit__)
            for name in self.names:
                self.start(name)
            failed.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for init in self._inits.values():
            os.kill(init, signal.SIGKILL)
        self._inits.clear()
        for process in self._processes:
            process.wait()

    def address(self, name: str) -> str:
        return f"{NETWORK}.{self.names.index(name) + 1}"

    def start(self, name: str) -> None:
        """Start a host, for the first time or after `crash`."""
        isolated = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        first = ["bash", "-c", _INIT, name, str(self._file)]
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *isolated, *first], start_new_session=True, stderr=subprocess.DEVNULL
        )
        self._processes.append(process)
        self._inits[name] = when_true(lambda: _child(process.pid), 10, lambda: f"the first process of {name}")
        when_true(lambda: self._names_itself(name), 10, lambda: f"the name of {name}")
        self._join(name)

    def command(self, name: str, command: Sequence[str], folder: Path | None = None) -> list[str]:
        """The command line that runs `command` on a host."""
        namespaces = ["nsenter", f"--target={self._inits[name]}", "--net", "--mount", "--uts", "--pid"]
        return [*namespaces, *([f"--wd={folder}"] if folder else []), "--", *command]

    def run(self, name: str, *command: str, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end."""
        folder = more.pop("folder", None)
        return subprocess.run(self.command(name, command, folder), capture_output=True, text=True, **more)

    def spawn(self, name: str, command: Sequence[str], output: Path, environment: Mapping[str, str]) -> None:
        """Start a process that lives as long as its host."""
        with output.open("ab") as file:
            line = self.command(name, command)
            process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)
        self._processes.append(process)

    def crash(self, name: str) -> None:
        """End all processes of a host and its network, without a word to the others."""
        self._on_bridge("link", "delete", f"to-{name}")
        os.kill(self._inits.pop(name), signal.SIGKILL)

    def _join(self, name: str) -> None:
        address = f"{self.address(name)}/24"
        if name == self.names[0]:
            self._on_bridge("link", "add", "hosts", "type", "bridge")
            self._on_bridge("address", "add", address, "dev", "hosts")
            self._on_bridge("link", "set", "hosts", "up")
            return
        cable = ["link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns"]
        self._on_bridge(*cable, str(self._inits[name]))
        self._on_bridge("link", "set", f"to-{name}", "master", "hosts", "up")
        self.run(name, "ip", "address", "add", address, "dev", "eth0", check=True)
        self.run(name, "ip", "link", "set", "eth0", "up", check=True)

    def _on_bridge(self, *command: str) -> None:
        """Configure the network of the first host; outside of its namespace of processes, as cables name other ones."""
        network = ["nsenter", f"--target={self._inits[self.names[0]]}", "--net"]
        subprocess.run([*network, "ip", *command], check=True, capture_output=True)

    def _names_itself(self, name: str) -> bool:
        return self.run(name, "hostname").stdout.strip() == name


def _child(parent: int) -> int:
    """The process that `parent` has started; 0 if there is none."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return int(children[0]) if children else 0


def when_true(value: Callable[[], Any], seconds: float, explained: Callable[[], str]) -> Any:
    """What `value` returns, as soon as it is true. Fails after so many seconds, with an explanation."""
    deadline = time.monotonic() + seconds
    while not (found := value()):
        assert time.monotonic() < deadline, f"not in {seconds} s: {explained()}"
        time.sleep(0.05)
    return found
