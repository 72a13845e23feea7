"""Columns and functions of the engine in this process: PySpark's names, written as DuckDB's SQL.

Only what the checks use, as Spark has it: strings name columns in arguments of functions and are values in comparisons;
what is compared with null is null; texts joined with a null are null; the places of a list begin at 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_FORMATTED = re.compile(r"%(?:\.\d+)?[sdf]")
_TYPES = {"bigint": "BIGINT", "int": "INTEGER", "string": "VARCHAR", "binary": "BLOB", "boolean": "BOOLEAN"}


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _operator(sign: str) -> Any:
    return lambda one, other: one._with(sign, other)


def _comparison(sign: str) -> Any:
    return lambda one, other: one._ordered(sign, other)


class Column:
    """An expression. ``name``: of the column that it becomes; ``fields``: of a struct that is made here, by name;
    ``is_real``: it is no whole number."""

    __hash__ = None  # type: ignore[assignment]  # == makes a column

    def __init__(
        self, sql: str, name: str = "", fields: dict[str, Column] | None = None, *, is_real: bool = False
    ) -> None:
        self.sql, self.name, self.fields, self.is_real = sql, name or sql, fields, is_real

    def __bool__(self) -> bool:
        raise TypeError("a column is neither true nor false: use & | ~")

    def __getitem__(self, key: Any) -> Column:
        """Return the field of a struct, the value of a map, or the item of a list."""
        return Column(f"{self.sql}[{key + 1 if isinstance(key, int) else literal(key)}]", str(key))

    def _with(self, sign: str, other: Any) -> Column:
        return Column(f"({self.sql} {sign} {value(other).sql})")

    def _ordered(self, sign: str, other: Any) -> Column:
        """Compare; structs field by field: DuckDB takes a null in a struct for the largest value."""
        fields = self.fields or (other.fields if isinstance(other, Column) else None)
        if fields is None:
            return self._with(sign, other)
        mine, theirs = (
            [*one.fields.values()] if one.fields else [one[name] for name in fields] for one in (self, other)
        )
        whole = mine[-1]._with(sign, theirs[-1])
        for left, right in list(zip(mine, theirs, strict=True))[-2::-1]:
            whole = left._with(sign[0], right) | (left == right) & whole
        return whole

    __eq__, __ne__, __add__, __sub__, __mul__, __and__, __or__ = map(_operator, ("=", "<>", "+", "-", "*", "AND", "OR"))
    __lt__, __le__, __gt__, __ge__ = map(_comparison, ("<", "<=", ">", ">="))
    eqNullSafe = _operator("IS NOT DISTINCT FROM")

    def __invert__(self) -> Column:
        return Column(f"(NOT {self.sql})")

    def __truediv__(self, other: Any) -> Column:
        return Column(self._with("/", other).sql, is_real=True)

    def isNull(self) -> Column:
        return Column(f"({self.sql} IS NULL)")

    def isNotNull(self) -> Column:
        return Column(f"({self.sql} IS NOT NULL)")

    def isin(self, *values: Any) -> Column:
        given = values[0] if len(values) == 1 and isinstance(values[0], list | tuple | set) else values
        return Column(f"({self.sql} IN ({', '.join(value(one).sql for one in given)}))" if given else "FALSE")

    def between(self, least: Any, most: Any) -> Column:
        return (self >= least) & (self <= most)

    def contains(self, text: str) -> Column:
        return call("contains", self, lit(text))

    def startswith(self, text: str) -> Column:
        return call("starts_with", self, lit(text))

    def cast(self, to: str) -> Column:
        sql = f"trunc({self.sql})" if self.is_real and to in ("bigint", "int") else self.sql
        return Column(f"encode({sql})" if to == "binary" else f"CAST({sql} AS {_TYPES[to]})", self.name)

    def try_cast(self, to: str) -> Column:
        return Column(f"TRY_CAST({self.sql} AS {_TYPES[to]})", self.name)

    def alias(self, name: str) -> Column:
        return Column(self.sql, name, self.fields, is_real=self.is_real)

    def over(self, window: Window) -> Column:
        return Column(f"{self.sql} OVER ({window.sql})")


class _Case(Column):
    """A chain of conditions."""

    def __init__(self, branches: str) -> None:
        super().__init__(f"CASE{branches} END")
        self._branches = branches

    def when(self, condition: Column, then: Any) -> _Case:
        return _Case(f"{self._branches} WHEN {condition.sql} THEN {value(then).sql}")

    def otherwise(self, other: Any) -> Column:
        return Column(f"CASE{self._branches} ELSE {value(other).sql} END")


class Window:
    """Rows beside a row."""

    unboundedPreceding = -(1 << 63)

    def __init__(self, sql: str = "") -> None:
        self.sql = sql

    @staticmethod
    def partitionBy(*names: str) -> Window:
        return Window("PARTITION BY " + ", ".join(col(name).sql for name in names))

    def orderBy(self, *names: str) -> Window:
        return Window(f"{self.sql} ORDER BY " + ", ".join(col(name).sql for name in names))

    def rowsBetween(self, first: int, last: int) -> Window:
        if (first, last) != (self.unboundedPreceding, -1):
            raise NotImplementedError(f"rows between {first} and {last}")
        return Window(f"{self.sql} ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING")


def literal(one: Any) -> str:
    """Return a value in SQL."""
    if one is None:
        return "NULL"
    if isinstance(one, str):
        parts = ("'" + part.replace("'", "''") + "'" for part in one.split("\0"))
        return "(" + " || chr(0) || ".join(parts) + ")" if "\0" in one else next(parts)
    return str(one).upper() if isinstance(one, bool) else str(one) if one >= 0 else f"({one})"


def lit(one: Any) -> Column:
    return Column(literal(one))


def col(name: str) -> Column:
    """Return a column, or with ``struct.field`` a field of it."""
    first, *fields = name.split(".")
    return Column(f"t.{quoted(first)}" + "".join(f"[{literal(field)}]" for field in fields), (fields or [first])[-1])


def column(one: Any) -> Column:
    """Return what is an argument of a function: text names a column."""
    return one if isinstance(one, Column) else col(one) if isinstance(one, str) else lit(one)


def value(one: Any) -> Column:
    """Return what is an operand: text is text."""
    return one if isinstance(one, Column) else lit(one)


def call(name: str, *arguments: Any) -> Column:
    return Column(f"{name}({', '.join(column(one).sql for one in arguments)})")


def expr(sql: str) -> Column:
    return Column(f"({sql})")


def when(condition: Column, then: Any) -> _Case:
    return _Case("").when(condition, then)


def struct(*names: Any) -> Column:
    fields = {one.name: one for one in map(column, names)}
    return Column("{" + ", ".join(f"{literal(name)}: {one.sql}" for name, one in fields.items()) + "}", fields=fields)


def concat(*texts: Any) -> Column:
    return Column("(" + " || ".join(column(one).sql for one in texts) + ")")


def format_string(text: str, *arguments: Any) -> Column:
    """Return text with values filled in; a null is told as such."""
    plain, found = _FORMATTED.split(text), _FORMATTED.findall(text)
    parts = [literal(plain[0])]
    for how, one, after in zip(found, arguments, plain[1:], strict=True):
        shown = column(one).sql
        shown = f"printf('{how}', CAST({shown} AS DOUBLE))" if how.endswith("f") else f"CAST({shown} AS VARCHAR)"
        parts += [f"coalesce({shown}, 'null')", literal(after)]
    return Column("(" + " || ".join(parts) + ")")


def count(one: Any) -> Column:
    return Column("count(*)") if isinstance(one, str) and one == "*" else call("count", one)


def array(*items: Any) -> Column:
    return Column(f"[{', '.join(column(one).sql for one in items)}]")


def array_compact(items: Column) -> Column:
    return Column(f"list_filter({items.sql}, lambda x: x IS NOT NULL)")


def get(items: Column, place: int) -> Column:
    return items[place]


def percentile_approx(one: Column, shares: Sequence[float], _accuracy: int) -> Column:
    return Column(f"quantile_disc({one.sql}, {list(shares)})")


def split(text: Any, at: str) -> Column:
    return call("string_split", text, lit(at))


def regexp_extract(text: Any, pattern: str, group: int) -> Column:
    return call("regexp_extract", text, lit(pattern), group)


def sha2(data: Column, bits: int) -> Column:
    return call(f"sha{bits}", data)


def date_format(moment: Column, form: str) -> Column:
    """Return a moment to the day, or to the microsecond: the two forms that there are."""
    return call("strftime", moment, lit("%Y-%m-%d" if form == "yyyy-MM-dd" else "%Y-%m-%d %H:%M:%S.%f"))


def to_utc_timestamp(moment: Column, _zone: Column) -> Column:
    return moment  # DuckDB's timestamps have no zone


def current_timezone() -> Column:
    return lit("UTC")


def broadcast(frame: Any) -> Any:
    return frame


def desc(name: str) -> Column:
    return Column(f"{col(name).sql} DESC")


def _named(name: str) -> Any:
    return lambda *arguments: call(name, *arguments)


coalesce, greatest, least, lag, row_number = map(_named, ("coalesce", "greatest", "least", "lag", "row_number"))
min, max, sum, bit_xor, every, min_by = map(_named, ("min", "max", "sum", "bit_xor", "bool_and", "min_by"))
xxhash64, timestamp_micros, timestamp_millis = map(_named, ("hash", "make_timestamp", "epoch_ms"))
explode, octet_length, floor, ceil = map(_named, ("unnest", "strlen", "floor", "ceil"))
pmod = _operator("%")


def concat_ws(between: str, *texts: Any) -> Column:
    return call("concat_ws", lit(between), *texts)
