"""Two tokenizations of one text, brought together by bytes. Without torch.

A boundary where both tokenizers end a token closes a span; inside a span the tokens of both sides spell the same bytes,
so the sums of their log-probabilities speak of the same event. Legend: S student's tokens, T teacher's tokens, n spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
NONE = -1


@dataclass(frozen=True)
class Alignment:
    """Which span each token of either side belongs to; -1: none."""

    span_bytes: NDArray[np.int64]
    """(n, 2) first byte and the byte after the last."""
    student_span: Ints
    """(S,)"""
    teacher_span: Ints
    """(T,)"""
    student_unaligned: Ints
    """Tokens with bytes that belong to no span: those after the last common boundary."""
    teacher_unaligned: Ints
    student_textless: Ints
    """Tokens without bytes, such as BOS and EOS: they belong to no span and lack nothing."""
    teacher_textless: Ints

    @property
    def spans(self) -> int:
        return len(self.span_bytes)

    @property
    def aligned_student_fraction(self) -> float:
        """Student tokens in a span over all of them, textless ones included; 0 where there are none."""
        return float((self.student_span != NONE).mean()) if len(self.student_span) else 0.0

    def student_sums(self, logp_S: NDArray[np.floating]) -> NDArray[np.float64]:
        """(n,) log-probability of each span's bytes as the student spells them."""
        return _sums(logp_S, self.student_span, self.spans)

    def teacher_sums(self, logp_T: NDArray[np.floating]) -> NDArray[np.float64]:
        return _sums(logp_T, self.teacher_span, self.spans)

    def teacher_on_student(self, logp_T: NDArray[np.floating]) -> NDArray[np.float64]:
        """(S,) what `TokenRows.teacher_logp_N` holds beside `span_N` = `student_span`: a span's whole teacher
        log-probability at its first student token, 0 at the others."""
        result_S = np.zeros(len(self.student_span))
        spans, first_S = np.unique(self.student_span, return_index=True)
        aligned = spans != NONE
        result_S[first_S[aligned]] = self.teacher_sums(logp_T)[spans[aligned]]
        return result_S


def align(student: Sequence[bytes], teacher: Sequence[bytes]) -> Alignment:
    """The spans of two token sequences, each token given as its bytes; b"" for a token without text.

    The common boundaries are the byte offsets where a token ends on both sides, inside the longest common prefix of the
    two texts; boundaries inside a multi-byte character count. After the first byte that differs nothing is aligned:
    what follows was written after different texts. Linear in the number of bytes. Source of the idea: byte-offset spans
    of TRL's GOLD.
    """
    text_s, text_t = b"".join(student), b"".join(teacher)
    ends_S, ends_T = _ends(student), _ends(teacher)
    common = np.intersect1d(ends_S, ends_T)
    # textless tokens at the very beginning "end" at 0, which closes no span
    common = common[(common > 0) & (common <= _common_prefix(text_s, text_t))]
    starts = np.concatenate([[0], common[:-1]]) if len(common) else common
    student_span, student_textless, student_unaligned = _assign(student, ends_S, common)
    teacher_span, teacher_textless, teacher_unaligned = _assign(teacher, ends_T, common)
    return Alignment(
        span_bytes=np.stack([starts, common], axis=1).astype(np.int64),
        student_span=student_span,
        teacher_span=teacher_span,
        student_unaligned=student_unaligned,
        teacher_unaligned=teacher_unaligned,
        student_textless=student_textless,
        teacher_textless=teacher_textless,
    )


def _ends(tokens: Sequence[bytes]) -> NDArray[np.int64]:
    return np.cumsum([len(token) for token in tokens], dtype=np.int64)


def _common_prefix(one: bytes, other: bytes) -> int:
    length = min(len(one), len(other))
    differs = np.frombuffer(one, np.uint8, length) != np.frombuffer(other, np.uint8, length)
    return int(differs.argmax()) if differs.any() else length


def _assign(tokens: Sequence[bytes], ends: NDArray[np.int64], common: NDArray[np.int64]) -> tuple[Ints, Ints, Ints]:
    """(span of each token, textless tokens, unaligned tokens)."""
    textless = np.asarray([not token for token in tokens], bool)
    # the first common boundary at or after the token's end
    span = np.searchsorted(common, ends, side="left").astype(np.int32)
    span[(span == len(common)) | textless] = NONE
    unaligned = (span == NONE) & ~textless
    return span, np.flatnonzero(textless).astype(np.int32), np.flatnonzero(unaligned).astype(np.int32)


def _sums(logp: NDArray[np.floating], span: Ints, spans: int) -> NDArray[np.float64]:
    if len(logp) != len(span):
        raise ValueError(f"{len(logp)} log-probabilities for {len(span)} tokens")
    aligned = span != NONE
    sums = np.bincount(span[aligned], weights=np.asarray(logp, np.float64)[aligned], minlength=spans)
    # bincount counts in whole numbers where nothing is aligned
    return sums.astype(np.float64)
