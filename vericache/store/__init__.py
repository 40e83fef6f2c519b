"""The host store of full KV, and the copies between it and device pages."""
