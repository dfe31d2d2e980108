"""An OpenAI-compatible server for trained policies."""
