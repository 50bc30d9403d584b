"""Worked solutions, written by code: what the tiny model is taught to write before its answer.

Each function takes the operands of one family and returns `(working, answer)`. Every written step needs
only what stands shortly before it, so that a small transformer can learn it, and the working grows with
the difficulty of the problem: the length of a response has a long tail because the work has one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

Solution = tuple[str, str]
"""The working (may be empty) and the final answer."""


def add(a: int, b: int) -> str:
    """Add two numbers >= 0 by columns, least digit first: `357+28` gives `7+8=15,5+2+1=8,3+0=3,`."""
    text, carry = "", 0
    while a or b or not text:
        (a, x), (b, y) = divmod(a, 10), divmod(b, 10)
        total = x + y + carry
        text += f"{x}+{y}{'+1' if carry else ''}={total},"
        carry = total // 10
    return text


def subtract(a: int, b: int) -> str:
    """Subtract by columns for a >= b >= 0, least digit first: `352-28` gives `12-8=4,5-2-1=2,3-0=3,`."""
    text, borrow = "", 0
    while a or b or not text:
        (a, x), (b, y) = divmod(a, 10), divmod(b, 10)
        lent = 10 if x - y - borrow < 0 else 0
        text += f"{x + lent}-{y}{'-1' if borrow else ''}={x + lent - y - borrow},"
        borrow = lent // 10
    return text


def signed_sum(total: int, term: int) -> str:
    """Write one line of a running sum, for any signs: `12-40` gives `12-40:10-2=8,4-1-1=2,>-28;`."""
    if (total < 0) == (term < 0) or not total:
        columns = add(abs(total), abs(term))
    else:
        columns = subtract(max(abs(total), abs(term)), min(abs(total), abs(term)))
    return f"{total}{term:+d}:{columns}>{total + term};"


def chain_sum(expression: str) -> Solution:
    """Work through `12+345-28` term by term."""
    total, *terms = (int(term) for term in re.findall(r"[+-]?\d+", expression))
    working = ""
    for term in terms:
        working += signed_sum(total, term)
        total += term
    return working, str(total)


def gcd(a: int, b: int) -> Solution:
    """Do Euclid's algorithm by repeated subtraction; the number of steps is the sum of the quotients."""
    a, b = max(a, b), min(a, b)
    working = ""
    while b:
        working += f"{a}-{b}={a - b};"
        a, b = max(a - b, b), min(a - b, b)
    return working, str(a)


def times_digit(a: int, digit: int) -> str:
    """Multiply by one digit, least digit first: `347*6` gives `7*6=42,4*6+4=28,3*6+2=20,`."""
    text, carry = "", 0
    for x in map(int, reversed(str(a))):
        total = x * digit + carry
        text += f"{x}*{digit}{f'+{carry}' if carry else ''}={total},"
        carry = total // 10
    return text


def products(factors: Sequence[int]) -> Solution:
    """Multiply numbers: one partial product for each digit, added to the running sum at once."""
    result, *others = factors
    working = ""
    for other in others:
        total, left = 0, result
        for place, digit in enumerate(map(int, reversed(str(other)))):
            partial = left * digit * 10**place
            working += f"{left}*{digit}{'0' * place}:{times_digit(left, digit)}>{partial};"
            working += signed_sum(total, partial) if place else ""
            total += partial
        result = total
    return working, str(result)


def spell_backward(word: str) -> Solution:
    """Write down the numbered letters of a word of up to ten, then read them from the last (the tenth is `0`)."""
    numbered = [f"{(place + 1) % 10}{letter}" for place, letter in enumerate(word)]
    return f"{''.join(numbered)}>{''.join(reversed(numbered))};", word[::-1]


def count_bits(number: int) -> Solution:
    """Halve the number down to zero and count the odd ones: `5:1,2:1,1:2,` (number, ones so far)."""
    working, ones = "", 0
    while number:
        ones += number % 2
        working += f"{number}:{ones},"
        number //= 2
    return working, str(ones)
