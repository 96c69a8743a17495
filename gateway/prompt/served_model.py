"""The model as the gateway knows it: its name, sizes, tokenizer, template and defaults."""

from dataclasses import dataclass

from gateway.base.sampling_defaults import SamplingDefaults
from gateway.base.settings import GatewaySettings
from gateway.grammar.tool_form import V3_FORM, ToolForm
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
    tool_form: ToolForm
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
        return cls(
            name=settings.served_model_name or folder.name,
            max_position=config.max_position,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            tokenizer=tokenizer,
            sanitizes_control_tokens=settings.sanitize_control_tokens,
            chat_template=chat_template,
            think_marks=ThinkMarks.of(tokenizer) if settings.reasoning_parser == "auto" else None,
            tool_form=ToolForm.of_template(chat_template.source) if chat_template else V3_FORM,
            sampling_defaults=defaults,
        )
