"""The glue between VeriCache's decisions and vLLM: rows, operations, connector, worker, runner hooks, sampler."""
