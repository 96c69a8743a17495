"""A gateway's compiler for a model with the marks of all tool formats."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.grammar.grammar_compiler import GrammarCompiler
from tests.gateway.model_folder import EOS_ID, make_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model_folder(tmp_path_factory.mktemp("tools") / "model")
    from tests.gateway.grammar.walks import TOKENIZER  # needs torch

    TOKENIZER.save(str(folder / "tokenizer.json"))
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def compiler(folder: Path) -> AsyncIterator[GrammarCompiler]:
    compiler = GrammarCompiler(folder, (EOS_ID,))
    yield compiler
    await compiler.close()
