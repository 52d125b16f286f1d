"""OpenAI's protocol, with the routes that vLLM, Jina and Cohere added to it."""
