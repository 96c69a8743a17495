"""Replies in OpenAI's form, whole and streamed."""
