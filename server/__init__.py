"""What VeriCache adds to vLLM's OpenAI server, as a vLLM endpoint plugin (``vllm.endpoint_plugins``)."""
