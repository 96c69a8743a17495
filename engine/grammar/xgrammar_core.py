"""xgrammar's own objects, without its Python package around them.

The package imports transformers: a second of every first grammar, for nothing that is needed
here. Only the modules that load the library are imported. Their names and arguments are not
public, hence the exact version in pyproject.toml.
"""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

PACKAGE = "xgrammar"
VOCABULARY_OF_BYTES = 0  # tokens as they are, not in some tokenizer's spelling


def load_core() -> Any:  # noqa: ANN401 - a module made in C++
    """The module with TokenizerInfo, GrammarCompiler and GrammarMatcher.
    Raises ImportError."""
    if PACKAGE in sys.modules:
        return importlib.import_module("xgrammar.base")._core
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("xgrammar is not installed")
    package = ModuleType(PACKAGE)
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules[PACKAGE] = package
    try:
        importlib.import_module("xgrammar.load_binding")
        return importlib.import_module("xgrammar.base")._core
    finally:
        del sys.modules[PACKAGE]  # whoever wants all of it can still have it
