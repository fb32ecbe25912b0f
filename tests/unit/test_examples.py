"""Drawn examples: the same in CI each time, and never judged by the clock."""

import os
import subprocess
import sys

import pytest

ASK = """
import tests.conftest
from hypothesis import settings
print(settings.default.derandomize, settings.default.deadline)
"""


@pytest.mark.parametrize(("ci", "profile"), [({"CI": "true"}, "True None"), ({}, "False None")])
def test_examples_are_the_same_each_time_in_ci_alone(ci, profile):
    """A change is not refused for an example that it did not draw, nor because the machine was slow."""
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | ci
    asked = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True)
    assert asked.stdout.strip() == profile, asked.stderr
