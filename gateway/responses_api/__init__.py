"""OpenAI's Responses API: its bodies as chat requests, replies in its form, and their memory."""
