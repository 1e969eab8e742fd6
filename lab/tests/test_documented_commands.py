"""Commands that documents and recipes show are ones that run would take."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tensor_memory_lab.commands.arguments import parse_run
from tensor_memory_lab.commands.sweep import sweep_command
from tensor_memory_lab.recipes import find_recipe

ROOT = Path(__file__).parents[2]
PLACES = ("*.md", "docs/**/*.md", "lab/plans/*.toml", "lab/src/tensor_memory_lab/recipes/*.py")


def shown() -> list[str]:
    """Lines that are a `tensor-memory-lab run` or `sweep` command, continued ones joined."""
    found = []
    for place in PLACES:
        for path in sorted(ROOT.glob(place)):
            text = re.sub(r"\\+\n#?\s*", "", path.read_text(encoding="utf-8"))
            found += re.findall(r"^#?\s*(tensor-memory-lab (?:run|sweep) [^\n|`…]*)$", text, re.M)
    return list(dict.fromkeys(found))


@pytest.mark.parametrize(
    "command", [line for line in shown() if "--help" not in line and "--plan" not in line]
)
def test_a_command_that_is_shown_is_one_that_exists(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    _, kind, *words = shlex.split(command, comments=True)
    if kind == "run":
        config, _ = parse_run(find_recipe(words[0]), words[1:])
        assert config.recipe == words[0]
    else:
        assert sweep_command([*words, "--dry-run"]) == 0
        assert " runs, " in capsys.readouterr().out


def test_a_plan_that_is_shown_is_there():
    plans = re.findall(r"--plan (\S+)", "\n".join(shown()))
    assert len(plans) > 2
    assert [plan for plan in plans if not (ROOT / plan).is_file()] == []


def test_commands_are_found():
    assert len(shown()) > 10
