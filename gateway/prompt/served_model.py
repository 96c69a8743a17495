"""The model as the gateway knows it: its name, sizes, tokenizer, template and defaults."""

from dataclasses import dataclass

from gateway.base.sampling_defaults import SamplingDefaults
from gateway.base.settings import GatewaySettings
from gateway.formats.registry import reasoning_format, tool_format
from gateway.formats.tool_format import ToolFormat
from gateway.prompt.chat_template import ChatTemplate
from gateway.text.think_marks import ThinkMarks
from gateway.text.tokenizer import Tokenizer
from model.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Read once at the start; `max_position` is in tokens. `think_marks` None: thoughts are left
    in the text."""

    name: str
    max_position: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer
    sanitizes_control_tokens: bool
    chat_template: ChatTemplate | None
    think_marks: ThinkMarks | None
    tool_format: ToolFormat
    sampling_defaults: SamplingDefaults

    @classmethod
    def load(cls, settings: GatewaySettings) -> "ServedModel":
        """Raises CheckpointError naming the file and field at fault."""
        folder = settings.model
        config = ModelConfig.from_folder(folder)
        tokenizer = Tokenizer.load(folder)
        defaults = SamplingDefaults()
        if settings.sampling_defaults == "model":
            defaults = SamplingDefaults.of_model(folder)
        chat_template = ChatTemplate.load(folder, tokenizer.special_tokens)
        template = chat_template.source if chat_template else ""
        form = tool_format(
            settings.tool_call_parser, template, lambda mark: tokenizer.token_id(mark) is not None
        )
        thoughts = reasoning_format(settings.reasoning_parser, form)
        return cls(
            name=settings.served_model_name or folder.name,
            max_position=config.max_position,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            tokenizer=tokenizer,
            sanitizes_control_tokens=settings.sanitize_control_tokens,
            chat_template=chat_template,
            think_marks=ThinkMarks.of(tokenizer, thoughts) if thoughts else None,
            tool_format=form.beginning_without(
                tokenizer.spelled_text([token_id]) for token_id in config.eos_token_ids
            ),
            sampling_defaults=defaults,
        )
