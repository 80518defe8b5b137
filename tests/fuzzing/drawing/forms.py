"""One pool of forms for each case: sums of positions, from which bounds, floats and indices are all taken.

What a code generator keeps for one use, another use finds: a bound of K that starts a float of the score, an index that
is a bound as well, two bounds that are equal however they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.fuzzing.drawing import language as la
from tests.fuzzing.drawing.dice import Choices
from tests.fuzzing.drawing.language import BOOL, FLOAT, HK, INT, KP, NK, NQ, QP, B, H, K, Node, P, Q, S, where
from tests.fuzzing.drawing.tables import ANY, Table, any_table

# Each in all its spellings, which are equal. A number c is never 0: that would be another form.
FORMS: dict[str, Callable[[int], Sequence[Node]]] = {
    "Q": lambda c: (Q,),
    "P": lambda c: (P, Q - (NQ - NK), NK - NQ + Q, NK - (NQ - Q)),
    "Q + c": lambda c: (Q + c, c + Q, Q - -c),
    "P + c": lambda c: (P + c, c + P, Q + (NK - NQ + c)),
    "2 * Q": lambda c: (2 * Q, Q * 2, Q + Q),
    "NK - Q": lambda c: (NK - Q, -(Q - NK), NK + -Q),
    "NK - Q - c": lambda c: (NK - Q - c, NK - (Q + c), -(Q + c - NK)),
    "H + Q": lambda c: (H + Q, Q + H, Q - -H),
    "HK": lambda c: (HK,),
    "c * HK": lambda c: (c * HK, HK * c, -(HK * -c)),
    "B": lambda c: (B,),
    "c * B + Q": lambda c: (c * B + Q, Q + B * c),
    "QP": lambda c: (QP,),
    "-(Q // c)": lambda c: (-(Q // abs(c)),),
    "Q // -c": lambda c: (Q // -abs(c),),
    "(Q - NK) // c": lambda c: ((Q - NK) // abs(c), -(NK - Q) // abs(c)),
    "(Q - 50) % c": lambda c: ((Q - 50) % abs(c), (-50 + Q) % abs(c)),
    "(Q - 50) % -c": lambda c: ((Q - 50) % -abs(c),),
    "c": lambda c: (la.constant(c),),
    "0": lambda c: (la.constant(0), Q - Q, 0 * Q),
}
ALIGNED = ("Q", "P", "Q", "P", "Q + c", "P + c")  # top left as often as bottom right; one at least is in every pool
BOUNDS: tuple[Callable[[Node, Node], Node], ...] = (
    lambda k, f: f >= k,
    lambda k, f: k <= f,
    lambda k, f: f > k,
    lambda k, f: f <= k,
    lambda k, f: k > f,
    lambda k, f: f < k,
    lambda k, f: k < f + 1,
    lambda k, f: k - f <= 0,
    lambda k, f: f - k >= 0,
    lambda k, f: -k >= -f,
)
OTHERS: tuple[Callable[[Node, int], Node], ...] = (
    lambda f, c: la.equal(H, 0),
    lambda f, c: la.equal(HK % 2, 1),
    lambda f, c: la.differ(B, 1),
    lambda f, c: la.equal(Q % 3, 1),
    lambda f, c: la.differ(K % 3, 1),
    lambda f, c: la.equal(f, K),
    lambda f, c: abs(f - K) < abs(c),
    lambda f, c: la.equal((f - K) % abs(c), 0),
    lambda f, c: la.equal(f // abs(c), K // abs(c)),
    lambda f, c: la.equal((K - f) // -abs(c), 0),
)
JOINS: tuple[Callable[[Node, Node, Node], Node], ...] = (
    lambda a, b, other: a,
    lambda a, b, other: a | other,
    lambda a, b, other: other | a,
    lambda a, b, other: a & other,
    lambda a, b, other: (a & b) | other,
    lambda a, b, other: (a & other) | b,
    lambda a, b, other: ~a,
    lambda a, b, other: ~(a & b),
    lambda a, b, other: a | b,
    lambda a, b, other: ~a & other,
    lambda a, b, other: where(other, a, b),
)
DISTANCES: tuple[Callable[[Node, Node, int], Node], ...] = (
    lambda f, k, c: f - k,
    lambda f, k, c: k - f,
    lambda f, k, c: abs(f - k),
    lambda f, k, c: abs(k - f),
)
# Division and remainder of negative numbers, and by them, as a simplifier would rearrange them; c is above 0.
NEGATIVE: tuple[Callable[[Node, Node, int], Node], ...] = (
    lambda f, k, c: (f - k) % c,
    lambda f, k, c: -((f - k) // c),
    lambda f, k, c: (f - k) // -c,
    lambda f, k, c: (k - f) % -c,
    lambda f, k, c: -(f - k) // c,
    lambda f, k, c: (f - k) // c * c + (f - k) % c,
    lambda f, k, c: (c * f - k) // c,
    lambda f, k, c: (c * (f - k) + 1) % c,
    lambda f, k, c: (f - k) // c // 2,
    lambda f, k, c: (f - k) % (2 * c) // c,
    lambda f, k, c: (k - NK) // c,
    lambda f, k, c: (k - NK) % -c - c,
    lambda f, k, c: la.minimum(f - k, 0) // c,
    lambda f, k, c: (f - k - c) // c % -3,
    lambda f, k, c: NK - f - c - k,
    lambda f, k, c: (c - k // (c + 1)) % 4,  # what TileLang's simplifier was wrong on
)
# Whole numbers of arrays have 64 bits, and so has what is computed with them.
WIDE: tuple[Callable[[Node, Node, int], Node], ...] = (
    lambda a, b, c: a - b < c,
    lambda a, b, c: a >= b,
    lambda a, b, c: la.equal(a, b),
    lambda a, b, c: (a + b) % c < 2,
    lambda a, b, c: la.equal(a // (c + 1) % 2, 0),
    lambda a, b, c: abs(a - b) <= c,
    lambda a, b, c: 3 * a > b + 2 * b - c,
    lambda a, b, c: la.differ(la.minimum(a, b) - a, 0),
    lambda a, b, c: -a // -c <= -b // -c,
    lambda a, b, c: a % -c > -2,
)
RATES = (-0.02, 0.05, 0.01, -0.1, 0.005)  # an error of one position reaches lse, and no score is beyond all others


class Pool:
    """The forms of one case, the arrays its texts read, and what they may share.

    reach: how large constants are, at most. Texts are drawn from it in any number; `names` tells what was taken.
    """

    def __init__(self, dice: Choices, reach: int) -> None:
        self.dice, self.reach = dice, reach
        self.tables: list[Table] = []
        self.names: list[str] = []
        self.made: dict[str, list[Node]] = {BOOL: [], INT: [], FLOAT: []}  # without S, to be used again
        names = [dice.one_of(ALIGNED), *(dice.one_of(list(FORMS)) for _ in range(dice.weighted({0: 3, 1: 4, 2: 1})))]
        self.forms = [FORMS[name](self.number()) for name in names]
        self.names += [f"form {name}" for name in names]

    def number(self) -> int:
        """Not 0; small ones as often as large ones."""
        size = 1 + self.dice.below(9 if self.dice.chance(0.6) else self.reach)
        return -size if self.dice.chance(0.4) else size

    def form(self) -> Node:
        """The first more often than others, so that uses meet."""
        return self.dice.one_of(self.forms[0] if self.dice.chance(0.4) else self.dice.one_of(self.forms))

    def position(self) -> Node:
        """The position of a query, top left or bottom right."""
        return self.dice.one_of(self.forms[0])

    def column(self) -> Node:
        kind = self.dice.weighted({"K": 14, "KP": 1, "K + c": 1, "NK - K": 1})
        return {"K": K, "KP": KP, "K + c": K + self.number(), "NK - K": NK - K}[kind]

    def shared(self, kind: str, made: Node) -> Node:
        self.made[kind].append(made)
        return made

    # -- what is made of forms -----------------------------------------------------------------------------------------
    def bound(self) -> Node:
        return self.shared(BOOL, self.dice.one_of(BOUNDS)(self.column(), self._bounding()))

    def _bounding(self) -> Node:
        form = self.form()
        kind = self.dice.weighted({"form": 12, "minimum": 1, "where": 1})
        if kind == "form":
            return form
        return la.minimum(form, self.form()) if kind == "minimum" else where(la.equal(H, 0), form, self.form())

    def other(self) -> Node:
        kind = self.dice.weighted({"form": 6, "negative": 1.5, "wide": 0.7, BOOL: 1, INT: 1, FLOAT: 2})
        if kind == "wide":
            return self.wide()
        if kind == "negative":
            beside = self.dice.one_of((self.form(), self.form(), la.constant(2)))
            return self.shared(BOOL, la.make(self.dice.one_of(("lt", "ge", "eq", "ne")), self.negative(), beside))
        if kind == BOOL:
            return self.read(BOOL)
        if kind == INT:
            return self.shared(BOOL, self.read(INT) < self.dice.one_of((self.form(), la.constant(3))))
        if kind == FLOAT:
            return self.shared(BOOL, self.read(FLOAT) > -0.2371)
        return self.shared(BOOL, self.dice.one_of(OTHERS)(self.form(), self.number()))

    def wide(self) -> Node:
        """A condition on whole numbers that 32 bits do not hold."""
        self.names.append("wide integers")
        same = self.dice.chance(0.5)  # one array for rows and keys, read by any index, or one for each
        tables = [self.table(Table((ANY if same else name,), "int64", "wide")) for name in ("QK" if not same else "Q")]
        a, b = (
            la.load(f"a{at}", INT, self.index_of_any(None) if same else la.variable(name))
            for at, name in zip(tables * 2 if same else tables, "QK", strict=True)
        )
        return self.shared(BOOL, self.dice.one_of(WIDE)(a, b, abs(self.number())))

    def distance(self) -> Node:
        made = self.dice.one_of(DISTANCES)(self.form(), self.column(), self.number())
        return self.shared(INT, made) if self.dice.chance(0.85) else self.negative()

    def negative(self) -> Node:
        return self.shared(INT, self.dice.one_of(NEGATIVE)(self.form(), self.column(), abs(self.number())))

    def amount(self) -> Node:
        """A float of a form, or of how far a key is from it."""
        if self.dice.chance(0.1):
            return self.dice.one_of(RATES) * self.read(INT)
        form = self.form() if self.dice.chance(0.2) else self.distance()
        if self.dice.chance(0.1):
            return la.as_float(form) / (abs(self.number()) + 1)
        return self.dice.one_of(RATES) * (la.as_float(form) if self.dice.chance(0.3) else form)

    # -- a mask and a score over them ----------------------------------------------------------------------------------
    def mask(self) -> Node:
        return self.dice.one_of(JOINS)(self.bound(), self.bound(), self.other())

    def score(self) -> Node:
        made = S
        for _ in range(1 + self.dice.below(2)):
            made = made + self._term()
        return made

    def _term(self) -> Node:
        kind = self.dice.weighted({"float": 5, "index": 3.5, "condition": 2, "masked": 0.5, "views": 0.6})
        if kind == "views":
            return self.views()
        if kind == "index":
            known = self.made[FLOAT]
            return self.dice.one_of(known) if known and self.dice.chance(0.7) else self.read(FLOAT)
        if kind == "float" and self.made[INT] and self.dice.chance(0.15):
            return self.dice.one_of(RATES) * self.dice.one_of(self.made[INT])
        if kind == "float":
            return self.amount()
        test = self.dice.one_of(self.made[BOOL]) if self.made[BOOL] and self.dice.chance(0.5) else self.bound()
        return where(test, self.amount(), -0.5 if kind == "condition" else -30.0)

    # -- arrays --------------------------------------------------------------------------------------------------------
    def read(self, kind: str, indices: Callable[[], Node] | None = None) -> Node:
        """A number of an array of one to four dimensions, at times of none: a new one, one that was read before, or
        another view of one. indices: makes more of them."""
        known = [i for i, x in enumerate(self.tables) if la.kind_of(x.dtype) == kind and x.is_reusable]
        at = self.dice.one_of(known) if known and self.dice.chance(0.5) else None
        if at is None:
            rank = self.dice.weighted({0: 0.3, 1: 6, 2: 3, 3: 1.5, 4: 1.5})
            found = [self._axis(indices) for _ in range(rank)]
            at = self.table(any_table(self.dice, kind, tuple(dim for dim, _ in found)))
            return self.shared(kind, la.load(f"a{at}", kind, *(index for _, index in found)))
        return self._read_again(self.twin(at) if self.dice.chance(0.4) else at, indices)

    def _read_again(self, at: int, indices: Callable[[], Node] | None = None) -> Node:
        table = self.tables[at]
        kind = la.kind_of(table.dtype)
        return self.shared(kind, la.load(f"a{at}", kind, *(self._again(dim, indices) for dim in table.dims)))

    def views(self) -> Node:
        """A float of an array, and one of the same array in another layout."""
        first = self.read(FLOAT)
        return first - 0.5 * self._read_again(self.twin(int(first.value[1:])))

    def table(self, table: Table) -> int:
        """The number of one more array."""
        self.tables.append(table)
        return len(self.tables) - 1

    def twin(self, at: int) -> int:
        """The number of one that has the same values, elsewhere."""
        table = self.tables[at]
        return self.table(Table(table.dims, table.dtype, table.fill, table.share, like=at))

    def _axis(self, indices: Callable[[], Node] | None) -> tuple[str | int, Node]:
        """How long an axis is, and where it is read."""
        if self.dice.chance(0.4):
            name = self.dice.weighted({"B": 1, "H": 2, "HK": 1, "Q": 2, "K": 2, "QP": 0.3, "KP": 0.3})
            if sum(table_size_names(x.dims) for x in self.tables) < 6:  # not every table as large as the scores
                return name, la.variable(name)
        index = self._index(indices)
        plain = la.settled(index)
        if plain.op == "var":
            return (plain.value if plain.value not in ("NQ", "NK") else ANY), index
        if plain.op == "const":
            return (plain.value + 1, index) if 0 <= plain.value < 60 else (ANY, index + 0 * Q)
        return ANY, index

    def _again(self, dim: str | int, indices: Callable[[], Node] | None) -> Node:
        """Another place along the axis of an array: by the variable it is made for, or any other index."""
        if isinstance(dim, str) and dim != ANY and self.dice.chance(0.5):
            return la.variable(dim)
        return self.index_of_any(indices)

    def index_of_any(self, indices: Callable[[], Node] | None) -> Node:
        """An index that an axis of any size takes: neither a variable alone nor a constant."""
        index = self._index(indices)
        plain = la.settled(index)
        return index + 1 if plain.op == "var" else index + 0 * Q if plain.op == "const" else index

    def _index(self, indices: Callable[[], Node] | None) -> Node:
        if indices is not None and self.dice.chance(0.3):
            return indices()
        kind = self.dice.weighted({"form": 3, "distance": 5, "part": 2, "known": 1, "head": 1})
        if kind == "known" and self.made[INT]:
            return self.dice.one_of(self.made[INT])
        if kind == "part":
            size = abs(self.number())
            return self.dice.one_of((self.form() // size, K // size, K % size, self.form() % -size))
        if kind == "head":
            return self.dice.one_of((H, HK, B))
        return self.form() if kind == "form" else self.distance()


def table_size_names(dims: tuple[str | int, ...]) -> int:
    """How many axes are as long as the call."""
    return sum(name in ("Q", "K", "QP", "KP") for name in dims)
