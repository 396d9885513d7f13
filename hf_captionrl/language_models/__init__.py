"""Language models that answer prompts: local, vLLM, or behind an OpenAI-compatible endpoint."""
