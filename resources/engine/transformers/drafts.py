"""Guesses of how an answer goes on, from how answers went on before.

Descriptions by one schema say the same again and again: the names of the fields, and many of their values.
What lives here: what was said after what, how far that can be trusted, and guesses made of it. What does not:
asking a model whether a guess is right (drafted_steps.py). Term: n-gram speculation, as in prompt lookup.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

_BEFORE_THE_ANSWER: Final = -1
_TRUST_AT_FIRST: Final = 0.5
_STEADINESS: Final = 0.8
"""What is left of a trust after one more answer; the rest is what that answer showed, 0 or 1."""

_LEAST_TRUST: Final = 0.2
"""A guess ends where it is less likely than that, and a continuation in which nobody trusts is replaced."""

Context = tuple[int, int]


class Drafts:
    """What mostly followed the last two tokens, in any answer of one model.

    most: tokens of a guess. remembered: contexts that are kept, those longest unused being forgotten; 65,536
    are about 15 MiB. Used by one thread.
    """

    def __init__(self, most: int, *, remembered: int = 1 << 16) -> None:
        self.most = most
        self._remembered = remembered
        self._followed: dict[Context, tuple[int, float]] = {}

    def guess(self, said: Sequence[int], room: int) -> list[int]:
        """Tokens that may follow the answer ``said``: none where nobody knows, ``room`` at most."""
        context, trust = _context(said, len(said)), 1.0
        tokens: list[int] = []
        while len(tokens) < min(self.most, room):
            followed = self._followed.get(context)
            if followed is None:
                break
            token, trusted = followed
            trust *= trusted
            if trust < _LEAST_TRUST:
                break
            tokens.append(token)
            context = (context[1], token)
        return tokens

    def learn(self, said: Sequence[int], new: int) -> None:
        """Remember what followed what in the last ``new`` tokens of the answer ``said``."""
        for at in range(len(said) - new, len(said)):
            context, token = _context(said, at), said[at]
            guessed, trust = self._followed.pop(context, (token, _TRUST_AT_FIRST))
            if guessed == token:
                trust += (1 - trust) * (1 - _STEADINESS)
            else:
                trust *= _STEADINESS
                if trust < _LEAST_TRUST:
                    guessed, trust = token, _TRUST_AT_FIRST
            self._followed[context] = guessed, trust  # the last one of them, so the last to be forgotten
        if len(self._followed) > self._remembered:
            for context in list(itertools.islice(self._followed, self._remembered // 2)):
                del self._followed[context]


def _context(said: Sequence[int], at: int) -> Context:
    """The two tokens before place ``at`` of an answer."""
    return (
        said[at - 2] if at > 1 else _BEFORE_THE_ANSWER,
        said[at - 1] if at > 0 else _BEFORE_THE_ANSWER,
    )
