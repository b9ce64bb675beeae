"""splitserve: prefill and decode of large language models on separate worker pools."""

__version__ = "0.1.0"
