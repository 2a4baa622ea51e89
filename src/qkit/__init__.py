"""qkit: which quantized form of a Qwen2.5 checkpoint to serve, with numbers to trust."""

__version__ = "0.1.0"
