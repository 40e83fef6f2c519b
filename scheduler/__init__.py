"""Pure decisions of VeriCache: rings, admission, the request life cycle, the round planner.

Standard library only. Nothing here knows torch, vLLM or a tensor: amounts are integers (KV pages,
nanoseconds of link time, iterations), requests are identifiers. The engine in ``vericache.engine``
turns these decisions into batch rows and page copies.
"""
