"""From messages to token ids: chat templates, tools in the prompt, the served model's files."""
