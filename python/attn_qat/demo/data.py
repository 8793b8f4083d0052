"""Real text that every Python has: the language reference that `help()` shows, from `pydoc_data.topics`.

Licence: Python Software Foundation License Version 2 (code examples also under 0BSD). Nothing is downloaded.
The topics repeat one another, so each paragraph is kept once, at its first place, before the text is split.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

CHUNK = 2000  # bytes of consecutive paragraphs that stay together
VALIDATION_EVERY = 8  # one chunk in eight is validation text


@dataclass(frozen=True)
class Corpus:
    source: str
    licence: str
    train: Tensor  # uint8, 1-D
    validation: Tensor
    sha256: str  # of train and validation text

    def batch(self, generator: torch.Generator, size: int, context: int) -> tuple[Tensor, Tensor]:
        """`size` random windows of the training text: bytes and the bytes that follow them, int64."""
        starts = torch.randint(len(self.train) - context, (size,), generator=generator)
        windows = self.train[starts[:, None] + torch.arange(context + 1)].long()
        return windows[:, :-1], windows[:, 1:]

    def validation_windows(self, context: int, limit: int | None = None) -> tuple[Tensor, Tensor]:
        """The validation text in consecutive windows, the same for every model."""
        starts = torch.arange(0, len(self.validation) - context, context)[:limit]
        windows = self.validation[starts[:, None] + torch.arange(context + 1)].long()
        return windows[:, :-1], windows[:, 1:]


def normalised(paragraph: str) -> str:
    """What makes two paragraphs the same: their words, whatever the indentation and the line breaks."""
    return " ".join(paragraph.split())


def split(documents: list[str]) -> tuple[list[str], list[str]]:
    """Training and validation paragraphs; no paragraph is in both or twice in one."""
    train, validation, seen, size, chunk = [], [], set(), 0, 0
    for paragraph in (p for document in documents for p in document.split("\n\n")):
        key = normalised(paragraph)
        if not key or key in seen:
            continue
        seen.add(key)
        last_of_cycle = chunk % VALIDATION_EVERY == VALIDATION_EVERY - 1
        (validation if last_of_cycle else train).append(paragraph.strip("\n"))
        size += len(paragraph)
        if size > CHUNK:
            size, chunk = 0, chunk + 1
    return train, validation


def read_documents(paths: list[Path]) -> tuple[list[str], str, str]:
    """Texts, their source and licence: Python's own reference, or the files that were asked for."""
    if paths:
        return (
            [p.read_text("utf-8", errors="replace") for p in paths],
            ", ".join(map(str, paths)),
            "not stated",
        )
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise SystemExit(
            "attn-qat demo: this Python lacks pydoc_data (a stripped standard library); use --text FILE"
        ) from None
    # Longest first, so that a paragraph stays in the chapter it belongs to and goes from its excerpts.
    documents = [topics[name] for name in sorted(topics, key=lambda name: (-len(topics[name]), name))]
    return documents, "Python language reference (pydoc_data.topics)", "PSF-2.0"


def load(paths: list[Path] = ()) -> Corpus:
    documents, source, licence = read_documents(list(paths))
    texts = ["\n\n".join(paragraphs).encode() for paragraphs in split(documents)]
    train, validation = (torch.tensor(list(text), dtype=torch.uint8) for text in texts)
    return Corpus(source, licence, train, validation, hashlib.sha256(b"\0".join(texts)).hexdigest())
