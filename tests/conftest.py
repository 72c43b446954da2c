"""Put the project's root on the import path, and skip the long tests unless they are asked for with `-m soak`."""
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def pytest_configure(config):
    config.addinivalue_line("markers", "soak: takes over 10 s; runs only with -m soak")


def pytest_collection_modifyitems(config, items):
    if "soak" not in (config.getoption("-m") or ""):
        for item in items:
            if "soak" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="long; run with -m soak"))
