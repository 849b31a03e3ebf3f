"""Refuses to be installed over a real DeepEP; everything else is in pyproject.toml.

pip builds in isolation, where a real DeepEP cannot be imported, so this looks into the folders that pip installs to.
A wheel that was built elsewhere passes by here: `deep_ep/__init__.py` checks again when it is imported.
"""

import sysconfig
from pathlib import Path

from setuptools import setup

# What pip leaves, `setup.py install` (which the instructions of DeepEP say), and `setup.py develop`.
TRACES = ("deep_ep-*.dist-info", "deep_ep-*.egg", "deep_ep-*.egg-info", "deep_ep.egg-link")

for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
    for found in (found for trace in TRACES for found in Path(folder).glob(trace)):
        raise SystemExit(
            f"hybrid-ep-as-deep-ep: a real DeepEP is installed ({found}); allowed: `pip uninstall deep_ep` first"
        )

setup()
