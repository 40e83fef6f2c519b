"""The demo: a bundled real model, real long prompts, plain vLLM against VeriCache."""
