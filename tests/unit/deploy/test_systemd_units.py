"""The units of deploy/systemd: systemd itself reads them, and what they start is there."""

import configparser
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from vlm_assets.commands.main import find_command

CHECKOUT = Path(__file__).resolve().parents[3]
DEPLOYED = CHECKOUT / "deploy" / "systemd"
UNITS = sorted(DEPLOYED.iterdir())
DOCUMENTS = "".join(path.read_text() for path in (CHECKOUT / "docs").glob("*.md"))


def read(unit: Path) -> configparser.ConfigParser:
    found = configparser.ConfigParser(strict=False, interpolation=None)
    found.optionxform = str  # type: ignore[assignment]  # systemd's names have capitals
    found.read_string(unit.read_text())
    return found


def test_systemd_knows_every_line(program: Callable[[str], Path], tmp_path: Path) -> None:
    """A misspelt option is ignored by systemd, and a unit without its restart stays down."""
    units = []
    for unit in UNITS:
        # What they start is installed later, so that only the file itself is judged.
        text = re.sub(r"^(Exec\w+=)\S+", r"\1/bin/true", unit.read_text(), flags=re.MULTILINE)
        units.append(tmp_path / unit.name)
        units[-1].write_text(re.sub(r"^(User|Group)=.*", r"\1=root", text, flags=re.MULTILINE))
    command = [program("systemd-analyze"), "verify", "--man=no", *units]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert [line for line in said.stderr.splitlines() if str(tmp_path) in line] == []


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_each_unit_starts_a_command_that_there_is(unit: Path) -> None:
    """A command that was renamed is renamed here; a timer starts a service of its name."""
    if unit.suffix == ".timer":
        assert unit.with_suffix(".service") in UNITS
        return
    service = read(unit)["Service"]
    assert service["User"] != "root"
    assert service["Type"] == "oneshot" if "Type" in service else service["Restart"] == "always"
    words = service["ExecStart"].split()
    if words[0].endswith("/vlm-assets"):
        command = find_command(words[1])
        if words[2:] and (inner := getattr(command, "commands", {}).get(words[2])):
            command = inner
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known


def test_the_folder_of_the_metrics_is_made_for_their_user() -> None:
    """On a bare machine nobody makes it, and the timer would fail each minute."""
    service = read(DEPLOYED / "vlm-assets-metrics.service")["Service"]
    file = Path(service["ExecStart"].split("--file ")[1])
    assert file.parent == Path("/var/lib") / service["StateDirectory"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_each_unit_is_in_the_handbook(unit: Path) -> None:
    """Nobody finds a file that no page names."""
    assert unit.stem in DOCUMENTS


@pytest.mark.parametrize(
    "unit", [unit for unit in UNITS if unit.suffix == ".service"], ids=lambda path: path.name
)
def test_each_service_is_closed_in(program: Callable[[str], Path], unit: Path) -> None:
    """A decoder or a model that is taken over stays in the service; the GPU stays in reach of it."""
    command = [program("systemd-analyze"), "security", "--offline=true", "--threshold=40", "--no-pager", unit]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout
    exposure = re.search(r"Overall exposure level for \S+: ([0-9.]+)", said.stdout)
    assert exposure is not None, said
    assert float(exposure[1]) < 4
    service = read(unit)["Service"]
    hides_devices = {
        "PrivateDevices",
        "MemoryDenyWriteExecute",
        "ProtectClock",
        "DevicePolicy",
        "DeviceAllow",
    }
    assert hides_devices.isdisjoint(service)
    assert "@clock" not in service["SystemCallFilter"], "doctor would call any clock right"
