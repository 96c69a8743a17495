"""A served model for tests of prompts: the files of a folder, and nothing that runs."""

import json
from pathlib import Path
from typing import Any

from gateway.base.settings import GatewaySettings
from gateway.prompt.chat_prompt import ChatPrompt, make_chat_prompt
from gateway.prompt.served_model import ServedModel
from gateway.requests.chat_request import ChatRequest
from tests.gateway.model_folder import make_model_folder


def load(folder: Path, **settings: Any) -> ServedModel:
    return ServedModel.load(GatewaySettings(model=folder, router="127.0.0.1:1", **settings))


def with_template(folder: Path, template: str, **settings: Any) -> ServedModel:
    make_model_folder(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return load(folder, **settings)


async def prompt_of(model: ServedModel, messages: list[dict[str, Any]], **body: Any) -> ChatPrompt:
    return await make_chat_prompt(
        ChatRequest(model="m", messages=messages, **body), model, num_bytes=0
    )


async def text_of(model: ServedModel, messages: list[dict[str, Any]], **body: Any) -> str:
    prompt = await prompt_of(model, messages, **body)
    return model.tokenizer.spelled_text(prompt.token_ids)
