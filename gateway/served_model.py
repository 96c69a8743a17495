"""The model as the gateway knows it: its name, sizes, tokenizer, template and defaults."""

from dataclasses import dataclass

from gateway.chat_template import ChatTemplate
from gateway.sampling_defaults import SamplingDefaults
from gateway.settings import GatewaySettings
from gateway.tokenizer import Tokenizer
from model.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Read once at the start; `max_position` is in tokens."""

    name: str
    max_position: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
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
        return cls(
            name=settings.served_model_name or folder.name,
            max_position=config.max_position,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            tokenizer=tokenizer,
            chat_template=ChatTemplate.load(folder, tokenizer.special_tokens),
            sampling_defaults=defaults,
        )
