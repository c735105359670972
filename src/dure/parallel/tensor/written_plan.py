"""Plan as a value, in a strategy's field, and as text, in run folders and on command lines.

    layers.*.expand=Column(unit=64); layers.*.contract=Row(unit=64);
    layers.*=Attributes("heads")+OwnDraws()

Patterns and entries are those of `dure.parallel.tensor.plan`, written as in Python, with `+`
between several entries; `ready`, `hf`, `rows`, `columns` and `alternating` are plans by name. That
module is imported only if there is a plan: strategies have the field, but most runs do not use it.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

from dure.settings import suggestion

if TYPE_CHECKING:
    from dure.parallel.tensor.plan import DivisionPlan, PlanEntry

READY = "ready"
"""Text of the built-in plan, the default."""

HUGGING_FACE = "hf"
"""Text of the plan that Hugging Face gives the model (`dure.parallel.tensor.hf_plan`)."""

NAMES = (READY, HUGGING_FACE, "rows", "columns", "alternating")
"""Plans that are known by name; the last three are in `dure.parallel.tensor.chain_plans`."""


def _known() -> dict[str, Any]:
    """Return the classes of plan entries, by name."""
    # Not at the top of this file: most runs have no plan, and plan.py imports all divided layers.
    from dure.parallel.tensor import plan

    return {kind.__name__: kind for kind in get_args(plan.PlanEntry)}


@dataclasses.dataclass(frozen=True, init=False)
class TensorPlan:
    """Division of a model.

    entries: patterns with their entries, in order. named: the name of a plan that makes its entries
    for each model, of `NAMES`; otherwise empty.
    """

    entries: tuple[tuple[str, tuple[PlanEntry, ...]], ...]
    named: str

    def __init__(self, written: DivisionPlan | str | TensorPlan | None = None) -> None:
        """Take a plan, or the text of a plan; None is the built-in plan.

        Raises ValueError for any other value, and for a plan without a text form.
        """
        entries: tuple[tuple[str, tuple[PlanEntry, ...]], ...] = ()
        named = ""
        if isinstance(written, TensorPlan):
            entries = written.entries
            named = written.named
        elif written is None or (isinstance(written, str) and written.strip() in NAMES):
            named = READY if written is None else written.strip()
        elif isinstance(written, str):
            entries = _read(written)
        elif isinstance(written, Mapping) and written:
            entries = tuple(
                (_pattern(pattern), _several(pattern, kinds)) for pattern, kinds in written.items()
            )
        else:
            raise ValueError(
                f"the plan is {written!r}, but it has to be a dict from patterns of names to "
                f"kinds, or one of {', '.join(NAMES)}; None uses the built-in plan"
            )
        object.__setattr__(self, "entries", entries)
        object.__setattr__(self, "named", named)
        # A run folder stores the text, and a resumed run must have the same plan.
        if isinstance(written, Mapping) and not self._is_read_again():
            raise ValueError(f"the plan {self} cannot be written as text: remove ; from its texts")

    @property
    def plan(self) -> DivisionPlan:
        """Plan for `parallelize`; `builtin_plans.plan_of` makes a plan by name for a model."""
        return dict(self.entries)

    @property
    def is_ready(self) -> bool:
        """Whether this is the model's built-in plan, which applies only with tensor ranks."""
        return self.named == READY

    def _is_read_again(self) -> bool:
        try:
            return _read(str(self)) == self.entries
        except ValueError:
            return False

    @property
    def label(self) -> str:
        """Text for this plan in a strategy's label."""
        if self.is_ready:
            return ""
        return f", {self.named}" if self.named else ", own plan"

    def __str__(self) -> str:
        texts = (f"{pattern}={'+'.join(map(entry_text, kinds))}" for pattern, kinds in self.entries)
        return self.named or "; ".join(texts)


def _pattern(pattern: Any) -> str:
    if isinstance(pattern, str) and pattern == pattern.strip() and not set(pattern) & set(";="):
        return pattern
    raise ValueError(
        f"the plan's {pattern!r} is not a pattern of module names: use a str without ; and =, "
        "such as layers.*"
    )


def _several(pattern: str, kinds: Any) -> tuple[PlanEntry, ...]:
    each: tuple[Any, ...] = tuple(kinds) if isinstance(kinds, (tuple, list)) else (kinds,)
    if not each:
        raise ValueError(f"the plan has no kind for {pattern!r}: leave it out")
    for kind in each:
        if not isinstance(kind, tuple(_known().values())):
            raise ValueError(
                f"the plan has {kind!r} for {pattern!r}, which is not one of the available kinds"
            )
    return each


def entry_text(kind: Any) -> str:
    """Return the Python call that makes an entry, without default arguments."""
    name = type(kind).__name__
    values = {
        field.name: (getattr(kind, field.name), field.default) for field in dataclasses.fields(kind)
    }
    # The names of `Attributes` are positional arguments.
    words = list(map(repr, values.pop("names")[0])) if "names" in values else []
    words += [f"{key}={value!r}" for key, (value, default) in values.items() if value != default]
    return f"{name}({', '.join(words)})"


def _read(text: str) -> tuple[tuple[str, tuple[PlanEntry, ...]], ...]:
    entries: dict[str, tuple[PlanEntry, ...]] = {}
    # A semicolon at the end leaves an empty entry, which is dropped.
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        pattern, equals, kinds = (part.strip() for part in entry.partition("="))
        if not equals or not kinds:
            raise ValueError(
                f"the plan's {entry!r} is not PATTERN=KIND, as layers.*.expand=Column()"
                f"{suggestion(entry, NAMES)}"
            )
        if pattern in entries:
            raise ValueError(f"the plan has {pattern!r} twice: write PATTERN=KIND()+KIND()")
        try:
            tree = ast.parse(kinds, mode="eval").body
        except SyntaxError:
            raise ValueError(
                f"the plan's {entry!r} cannot be read: write Column() or Column(blocks=3)"
            ) from None
        entries[pattern] = tuple(_kinds(tree))
    if not entries:
        raise ValueError(f"the plan {text!r} is empty; {READY} is the model's built-in plan")
    return tuple(entries.items())


def _kinds(tree: ast.expr) -> list[PlanEntry]:
    """Return the entries of an expression `A() + B(1)`."""
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        return [*_kinds(tree.left), *_kinds(tree.right)]
    # `Row` alone is read as `Row()`
    call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
    name = call.func.id if isinstance(call.func, ast.Name) else ast.unparse(call.func)
    known = _known()
    if name not in known:
        raise ValueError(f"a plan has no {name!r}{suggestion(name, known)}")
    starred = any(isinstance(one, ast.Starred) for one in call.args)
    if starred or any(one.arg is None for one in call.keywords):
        raise ValueError(
            f"the plan's {ast.unparse(tree)} is not valid: write its arguments one by one"
        )
    try:
        # Literals only: a plan may come from a file, and is never executed.
        arguments = [ast.literal_eval(argument) for argument in call.args]
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        return [known[name](*arguments, **named)]
    except (ValueError, TypeError) as error:
        raise ValueError(f"the plan's {ast.unparse(tree)} is not valid: {error}") from error
