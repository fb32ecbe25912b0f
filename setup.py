"""Put ``resources`` and ``sensors`` below ``vlm_assets`` in the wheel: users' projects have their own.

The core and each extension of ``distributions`` are built by this file. The build renames folders, imports,
and dotted names in texts (``python -m``, dagster.yaml). An editable install keeps the names of the checkout.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
MOVED = ("resources", "sensors")
ABOVE = "vlm_assets"


class WheelDistribution(Distribution):
    """The packages under the names that they have in the wheel."""

    def parse_config_files(self, *arguments: object, **options: object) -> None:
        """Read pyproject.toml, then rename."""
        super().parse_config_files(*arguments, **options)
        self.packages = [
            f"{ABOVE}.{name}" if name.startswith(MOVED) else name for name in self.packages or []
        ]
        moved = {f"{ABOVE}.{name}": name for name in MOVED}
        here = {name: folder for name, folder in moved.items() if name in self.packages}
        self.package_dir = {**(self.package_dir or {}), **here}


class BuildRenamed(build_py):
    """Copies the files, then gives what they import its new name."""

    def run(self) -> None:
        """Build all packages. What an earlier build left goes first: a wheel takes in all that is there."""
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        modules = {path.stem for name in MOVED for path in (HERE / name).iterdir()}
        names = re.compile(
            rf"(?<![\w./])(?=(?:{'|'.join(MOVED)})\.(?:{'|'.join(sorted(modules))})\b)"
            rf"|(?<=\bfrom )(?=(?:{'|'.join(MOVED)}) import )"
        )
        for path in Path(self.build_lib).rglob("*"):
            if path.suffix in (".py", ".yaml"):
                text = path.read_text(encoding="utf-8")
                path.write_text(names.sub(f"{ABOVE}.", text), encoding="utf-8")


if "editable_wheel" in sys.argv:
    setup()
else:
    setup(distclass=WheelDistribution, cmdclass={"build_py": BuildRenamed})
