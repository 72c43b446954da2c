"""README.md and tutorial.md may only quote code that exists, name flags and functions that exist, and link somewhere."""

import csv
import dataclasses
import re
import statistics
from pathlib import Path

import pytest

import sppo

ROOT = Path(__file__).resolve().parent.parent
CODE = "\n".join(p.read_text() for p in (ROOT / "sppo.py", ROOT / "value_head.py", ROOT / "reward.py"))
PAGES = ["README.md", "tutorial.md"]


def test_quoted_code_stands_in_the_source():
    lines = {line.strip() for line in CODE.splitlines()}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "tutorial.md").read_text(), re.S):
        for line in filter(None, map(str.strip, block.splitlines())):
            assert line in lines, line


@pytest.mark.parametrize("page", PAGES)
def test_flags_exist(page):
    known = {f.name.replace("_", "-") for f in dataclasses.fields(sppo.Config)}
    known |= {"nproc-per-node", "shutdown-timeout", "index-url", "help"}  # torchrun's, pip's, argparse's
    for script in (ROOT / "tests").glob("*.py"):
        known |= set(re.findall(r'add_argument\("--([a-z-]+)"', script.read_text()))
    for flag in re.findall(r"(?<![\w-])--([a-z][a-z-]+)", (ROOT / page).read_text()):
        assert flag in known, flag


def test_functions_named_in_the_tutorial_exist():
    for name in re.findall(r"`([a-z_]+)`", (ROOT / "tutorial.md").read_text()):
        key = name in {"reward", "value", "kl", "entropy"} or f'"{name}"' in CODE or f"{name}=" in CODE
        assert f"def {name}(" in CODE or key, name


@pytest.mark.parametrize("page", PAGES)
def test_files_named_exist(page):
    text = (ROOT / page).read_text()
    for path in re.findall(r"(?<![\w/])((?:tests|toy|assets)/[\w./-]+\.\w+)", text) + re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / path).exists(), path


def test_links_inside_the_tutorial_lead_to_its_headings():
    text = (ROOT / "tutorial.md").read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors


def test_tests_named_in_the_readme_exist():
    tests = "\n".join(p.read_text() for p in (ROOT / "tests").glob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", (ROOT / "README.md").read_text()):
        assert f"def {name}(" in tests, name


def test_the_readmes_comparison_is_that_of_the_csv():
    rows = {line.split(" | ")[0][2:]: line for line in (ROOT / "README.md").read_text().splitlines() if line[:2] == "| "}
    runs = {}
    for row in csv.DictReader(open(ROOT / "assets/compare.csv")):
        if row["picture"] == "compare":
            runs.setdefault(row["series"], {}).setdefault(row["run"], []).append(float(row["y"]))
    assert len(runs) == 8
    for name, curves in runs.items():
        for values in ([c[-1] for c in curves.values()], [statistics.mean(c) for c in curves.values()]):
            assert f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}" in rows[name], name


def test_the_pages_speak_of_the_toys_recipe():
    warmup = sppo.RECIPES["toy/model"]["critic_warmup"]
    assert f"first {warmup} steps" in (ROOT / "README.md").read_text()
    assert f"{warmup} steps alone" in (ROOT / "tutorial.md").read_text()
