"""Adapters to other libraries, one module each; importing attn_qat imports none of them."""
