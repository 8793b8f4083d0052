"""The implementations that a run can compare. Each file adapts one; nothing of them is copied here."""

from __future__ import annotations

from . import attn_qat, copy, cudnn_frontend, eager, fastvideo, flash_attn4, sdpa
from .base import Peer

_FILES = (attn_qat, eager, sdpa, flash_attn4, fastvideo, cudnn_frontend, copy)
PEERS: dict[str, Peer] = {peer.name: peer for file in _FILES for peer in file.PEERS}
