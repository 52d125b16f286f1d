"""OpenAI's protocol, and the routes that vLLM, Jina and Cohere added to it."""
