"""The table of named cases, and the parser for cases given as numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Case:
    """Self-attention of one shape: (batch, heads, seq, head_dim)."""

    name: str
    batch: int
    heads: int
    seq: int
    head_dim: int
    causal: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.seq, self.head_dim

    def with_seq(self, seq: int) -> Case:
        return replace(self, seq=seq)

    def __str__(self) -> str:
        return f"{self.name} ({','.join(map(str, self.shape))}{', causal' if self.causal else ''})"


CASES = {
    case.name: case
    for case in (
        Case("cpu_2k", 1, 8, 2048, 128),
        Case("cpu_8k", 1, 4, 8192, 128),
        Case("wan_480p", 1, 3, 31200, 128),  # a quarter of the heads of a 480p video diffusion transformer
        Case("long_16k", 1, 16, 16384, 128),
        Case("long_16k_causal", 1, 16, 16384, 128, causal=True),
        Case("llm_4k_causal", 4, 16, 4096, 128, causal=True),
        Case("d64_8k", 2, 32, 8192, 64),
        Case("small_512", 2, 12, 512, 64),
        Case("small_1k", 1, 16, 1024, 128),
        Case("one_gib", 4, 32, 32768, 128),  # 1 GiB in 16 bits: for the operators that only move memory
        Case("tiny", 1, 2, 128, 64),
    )
}


def parse_case(text: str) -> Case:
    """A name of the table, or B,H,S,D with ',causal' after it if wanted."""
    if text in CASES:
        return CASES[text]
    numbers, _, rest = text.partition(",causal")
    try:
        batch, heads, seq, head_dim = map(int, numbers.split(","))
    except ValueError:
        rest = "?"
    if rest or min(batch, heads, seq, head_dim) < 1:
        raise ValueError(f"case {text!r}: takes B,H,S,D or B,H,S,D,causal, or one of {', '.join(CASES)}")
    return Case("custom", batch, heads, seq, head_dim, text.endswith(",causal"))
