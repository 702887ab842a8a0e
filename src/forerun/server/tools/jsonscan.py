"""JSON, one character at a time: where a value ends, and whether it still can be one.

A pushdown automaton that accepts what `json.loads` accepts, but for NaN and Infinity. It builds no
value and looks at each character once.
"""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["JsonScanner", "Scan"]

WHITESPACE = " \t\n\r"
DIGITS = "0123456789"
LITERALS = {"t": "rue", "f": "alse", "n": "ull"}


class Scan(Enum):
    """What a character means for the value."""

    MORE = auto()  # the value goes on
    DONE = auto()  # this character ends it
    DONE_BEFORE = auto()  # the value, a number, had ended before this character
    WRONG = auto()  # with this character it is not JSON


class _State(Enum):
    VALUE = auto()
    FIRST_ITEM = auto()  # a value or ]
    FIRST_KEY = auto()  # a key or }
    KEY = auto()
    COLON = auto()
    AFTER = auto()  # a comma or the end of what surrounds
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    LITERAL = auto()
    MINUS = auto()
    ZERO = auto()
    INTEGER = auto()
    POINT = auto()
    FRACTION = auto()
    EXPONENT = auto()
    SIGN = auto()
    POWER = auto()


# What of a number may follow in a state: characters, and the state after them.
_NUMBER: dict[_State, tuple[tuple[str, _State], ...]] = {
    _State.MINUS: (("0", _State.ZERO), (DIGITS, _State.INTEGER)),
    _State.ZERO: ((".", _State.POINT), ("eE", _State.EXPONENT)),
    _State.INTEGER: (
        (DIGITS, _State.INTEGER),
        (".", _State.POINT),
        ("eE", _State.EXPONENT),
    ),
    _State.POINT: ((DIGITS, _State.FRACTION),),
    _State.FRACTION: ((DIGITS, _State.FRACTION), ("eE", _State.EXPONENT)),
    _State.EXPONENT: (("+-", _State.SIGN), (DIGITS, _State.POWER)),
    _State.SIGN: ((DIGITS, _State.POWER),),
    _State.POWER: ((DIGITS, _State.POWER),),
}
_WHOLE_NUMBER = frozenset({_State.ZERO, _State.INTEGER, _State.FRACTION, _State.POWER})


class JsonScanner:
    """Follow one JSON value from its first character, which is not white space."""

    def __init__(self) -> None:
        self._state = _State.VALUE
        self._open: list[str] = []  # brackets whose end is to come
        self._is_key = False  # of the string that is being read
        self._rest = ""  # of a literal
        self._num_hex = 0

    def feed(self, char: str) -> Scan:
        """Take the next character."""
        state = self._state
        if state is _State.STRING:
            return self._string(char)
        if state in _NUMBER:
            return self._number(char)
        if state is _State.ESCAPE:
            return self._escape(char)
        if state is _State.HEX:
            return self._hex(char)
        if state is _State.LITERAL:
            return self._literal(char)
        if char in WHITESPACE:
            return Scan.MORE if self._open else Scan.WRONG
        return self._structure(char)

    def _structure(self, char: str) -> Scan:
        state = self._state
        if state is _State.AFTER:
            if char == ",":
                return self._to(_State.KEY if self._open[-1] == "{" else _State.VALUE)
            return self._close(char)
        if state is _State.COLON:
            return self._to(_State.VALUE) if char == ":" else Scan.WRONG
        if state in (_State.KEY, _State.FIRST_KEY):
            if char == '"':
                self._is_key = True
                return self._to(_State.STRING)
            return self._close(char) if state is _State.FIRST_KEY else Scan.WRONG
        if char == "]" and state is _State.FIRST_ITEM:
            return self._close(char)
        return self._value(char)

    def _value(self, char: str) -> Scan:
        if char in "{[":
            self._open.append(char)
            return self._to(_State.FIRST_KEY if char == "{" else _State.FIRST_ITEM)
        if char == '"':
            self._is_key = False
            return self._to(_State.STRING)
        if char in LITERALS:
            self._rest = LITERALS[char]
            return self._to(_State.LITERAL)
        if char == "-":
            return self._to(_State.MINUS)
        if char in DIGITS:
            return self._to(_State.ZERO if char == "0" else _State.INTEGER)
        return Scan.WRONG

    def _string(self, char: str) -> Scan:
        if char == '"':
            return self._to(_State.COLON) if self._is_key else self._ended()
        if char == "\\":
            return self._to(_State.ESCAPE)
        return Scan.MORE if char >= " " else Scan.WRONG

    def _escape(self, char: str) -> Scan:
        if char == "u":
            self._num_hex = 4
            return self._to(_State.HEX)
        return self._to(_State.STRING) if char in '"\\/bfnrt' else Scan.WRONG

    def _hex(self, char: str) -> Scan:
        if char not in "0123456789abcdefABCDEF":
            return Scan.WRONG
        self._num_hex -= 1
        return Scan.MORE if self._num_hex else self._to(_State.STRING)

    def _literal(self, char: str) -> Scan:
        if char != self._rest[0]:
            return Scan.WRONG
        self._rest = self._rest[1:]
        return Scan.MORE if self._rest else self._ended()

    def _number(self, char: str) -> Scan:
        for chars, state in _NUMBER[self._state]:
            if char in chars:
                return self._to(state)
        if self._state not in _WHOLE_NUMBER:
            return Scan.WRONG
        if not self._open:
            return Scan.DONE_BEFORE
        self._state = _State.AFTER
        return self.feed(char)  # once: AFTER is no number

    def _close(self, char: str) -> Scan:
        if {"{": "}", "[": "]"}[self._open[-1]] != char:
            return Scan.WRONG
        self._open.pop()
        return self._ended()

    def _ended(self) -> Scan:
        self._state = _State.AFTER
        return Scan.MORE if self._open else Scan.DONE

    def _to(self, state: _State) -> Scan:
        self._state = state
        return Scan.MORE
