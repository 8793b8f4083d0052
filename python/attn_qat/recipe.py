"""Which operands of attention are FP4."""

from enum import Enum


class Recipe(str, Enum):
    """Quantisation recipe; every function that takes one also takes its string.

    ========  ===============  ===============  ==========================================
    recipe    Q, K             V                P
    ========  ===============  ===============  ==========================================
    CUDNN     along head dim   along head dim   normalised, with local scales in backward
    FP4       along head dim   along kv         against a power of two, as FP4 tensor cores
    FP4_QK    along head dim   not quantised    not quantised
    ========  ===============  ===============  ==========================================
    """

    CUDNN = "cudnn"
    FP4 = "fp4"
    FP4_QK = "fp4_qk"

    @classmethod
    def _missing_(cls, value):
        raise ValueError(f"recipe is {value!r}, takes 'cudnn', 'fp4' or 'fp4_qk'")

    def __str__(self) -> str:
        return self.value
