"""Weight views: values computed from parameters and constants alone, and where they meet data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from etrace_bridge._errors import CompilationError
from etrace_bridge._jax_compat import JaxprEqn, Var
from etrace_bridge.compiler.contacts import ContactForm, contact_form
from etrace_bridge.compiler.diagnostics import Path, show_path
from etrace_bridge.compiler.jaxpr import evaluate, variables
from etrace_bridge.compiler.module_info import ModuleInfo
from etrace_bridge.compiler.primitives import (
    is_elementwise,
    is_float,
    is_structural,
    passes_derivative,
)


@dataclass(frozen=True)
class WeightView:
    """How a traced view `v = g(theta)` is computed from the parameters.

    Attributes:
        var: the view's variable.
        eqns: the equations from parameters and constants to it, in order.
        paths: the parameters it is computed from, in the order the model takes them.
    """

    var: Var
    eqns: tuple[JaxprEqn, ...]
    paths: tuple[Path, ...]

    def __call__(self, env: dict[Var, Any]) -> Any:
        """Return the view's value, given the values of parameter leaves and constants."""
        return evaluate(self.eqns, dict(env))[self.var]

    def __str__(self) -> str:
        names = ", ".join(show_path(p) for p in self.paths)
        steps = " -> ".join(eqn.primitive.name for eqn in self.eqns)
        return f"{names} -> {steps}" if steps else names


@dataclass(frozen=True)
class Part:
    """A piece of a contact's output that the step reads: the whole, one gate, or a spread copy.

    Attributes:
        var: the piece's variable.
        form: the linear form restricted to the piece.
        letter: the output letter along which it is a slice; empty if it is not one.
        start: where the slice starts.
    """

    var: Var
    form: ContactForm
    letter: str = ""
    start: int = 0


@dataclass(frozen=True)
class Contact:
    """One equation in which a weight view meets data.

    Attributes:
        index: its index among the contacts.
        eqn_index: its index among the step's equations.
        eqn: the equation.
        form: its linear form; None where the table has no rule, and the contact then gets no trace.
        view: the weight view.
        y: the equation's output.
        x: the data operand; None for an element-wise contact.
        parts: the pieces of `y` that the step reads; each is followed by itself.
    """

    index: int
    eqn_index: int
    eqn: JaxprEqn
    form: ContactForm | None
    view: WeightView
    y: Var
    x: Any = None
    parts: tuple[Part, ...] = ()

    @property
    def traced_form(self) -> ContactForm:
        """The form of a contact that has a trace."""
        if self.form is None:
            raise CompilationError(
                f"The contact of `{show_path(self.view.paths[0])}` has no trace, because its primitive "
                "has no contact rule. `register_contact` adds one."
            )
        return self.form


@dataclass(frozen=True)
class WeightUse:
    """Where parameters are used: the variables that are weights alone, and the contacts."""

    weight_paths: dict[Var, tuple[Path, ...]]
    contacts: tuple[Contact, ...]
    contact_of_eqn: dict[int, tuple[Contact, ...]]


def find_weight_use(minfo: ModuleInfo) -> WeightUse:
    """Follow parameters through the step until each meets data."""
    eqns = minfo.jaxpr.eqns
    order = {p: i for i, p in enumerate(minfo.weight_path_to_invars)}
    paths: dict[Var, tuple[Path, ...]] = {
        v: (p,) for v, p in minfo.invar_to_weight_path.items() if is_float(v)
    }
    data = {v for v in minfo.jaxpr.invars if v not in paths}
    producer: dict[Var, int] = {}
    found: dict[tuple[int, int], None] = {}
    for i, eqn in enumerate(eqns):
        weights = {k: v for k, v in enumerate(eqn.invars) if isinstance(v, Var) and v in paths}
        if any(v in data for v in variables(eqn.invars)):
            data.update(eqn.outvars)
            for k in weights:
                found[_contact_site(eqn, i, k, producer)] = None
            continue
        if weights and passes_derivative(eqn):
            joined = {p for v in weights.values() for p in paths[v]}
            paths.update(
                (v, tuple(sorted(joined, key=order.__getitem__)))
                for v in eqn.outvars
                if is_float(v)
            )
        producer.update((v, i) for v in eqn.outvars)
    contacts = []
    readers = _readers(minfo)
    for n, (i, k) in enumerate(sorted(found)):
        eqn = eqns[i]
        form = contact_form(eqn, k)
        var = cast(Var, eqn.invars[k])  # a site is an operand with a weight, never a constant
        view = WeightView(var, _equations_of(var, eqns, producer), paths[var])
        x = eqn.invars[form.x_index] if form is not None and form.x_index is not None else None
        parts = _find_parts(eqn.outvars[0], form, readers) if form is not None else ()
        contacts.append(Contact(n, i, eqn, form, view, eqn.outvars[0], x, parts))
    for c in contacts:
        for v in c.eqn.outvars:
            paths.pop(v, None)
    by_eqn: dict[int, tuple[Contact, ...]] = {}
    for c in contacts:
        by_eqn[c.eqn_index] = (*by_eqn.get(c.eqn_index, ()), c)
    return WeightUse(paths, tuple(contacts), by_eqn)


def _equations_of(
    var: Var, eqns: Sequence[JaxprEqn], producer: dict[Var, int]
) -> tuple[JaxprEqn, ...]:
    """Return the equations without data that make a view."""
    found: set[int] = set()
    pending = [var]
    while pending:
        i = producer.get(pending.pop())
        if i is not None and i not in found:
            found.add(i)
            pending += variables(eqns[i].invars)
    return tuple(eqns[i] for i in sorted(found))


def _readers(minfo: ModuleInfo) -> dict[Var, list[JaxprEqn | None]]:
    """Return the equations that read each variable; None stands for an output of the step."""
    readers: dict[Var, list[JaxprEqn | None]] = {}
    for eqn in minfo.jaxpr.eqns:
        for v in variables(eqn.invars):
            readers.setdefault(v, []).append(eqn)
    for v in variables(minfo.jaxpr.outvars):
        readers.setdefault(v, []).append(None)
    return readers


def _find_parts(
    y: Var, form: ContactForm, readers: dict[Var, list[JaxprEqn | None]]
) -> tuple[Part, ...]:
    whole = (Part(y, form),)
    users = readers.get(y, [])
    reader = users[0] if len(users) == 1 else None
    if reader is None or form.shape(form.out) != y.aval.shape:
        return whole
    if reader.primitive.name == "split":
        return _gates(form, reader) or whole
    if reader.primitive.name == "broadcast_in_dim":
        return (_spread_part(y, form, reader),)
    return whole


def _gates(form: ContactForm, eqn: JaxprEqn) -> tuple[Part, ...] | None:
    """Return the pieces of a fused product that is split along an axis of the weight alone."""
    letter = form.out[eqn.params["axis"]]
    if letter not in form.view or letter in form.feature:
        return None
    parts, start = [], 0
    for var, size in zip(eqn.outvars, eqn.params["sizes"], strict=True):
        parts.append(
            Part(var, replace(form, sizes={**form.sizes, letter: int(size)}), letter, start)
        )
        start += int(size)
    return tuple(parts)


def _spread_part(y: Var, form: ContactForm, eqn: JaxprEqn) -> Part:
    """Return the spread copy of a product whose values each feed many positions.

    The new axes are letters of the output alone.
    """
    shape, dims = eqn.outvars[0].aval.shape, eqn.params["broadcast_dimensions"]
    fresh = iter(c for c in "ABCDEFGHIJ")
    out, sizes, dropped = [""] * len(shape), dict(form.sizes), set()
    for n, d in enumerate(dims):
        if y.aval.shape[n] == shape[d]:
            out[d] = form.out[n]
        else:
            dropped.add(form.out[n])
    for d, letter in enumerate(out):
        if not letter:
            out[d] = next(fresh)
            sizes[out[d]] = shape[d]

    def keep(letters: str) -> str:
        return "".join(c for c in letters if c not in dropped)

    spread = replace(
        form, sizes=sizes, out="".join(out), view=keep(form.view), feature=keep(form.feature)
    )
    return Part(eqn.outvars[0], spread)


def _contact_site(
    eqn: JaxprEqn, index: int, operand: int, producer: dict[Var, int]
) -> tuple[int, int]:
    """Return (equation, operand) at which the view enters.

    For element-wise and structural uses that is the equation that spreads it.
    """
    maker = producer.get(cast(Var, eqn.invars[operand]))
    joins = is_elementwise(eqn) or is_structural(eqn)
    if maker is not None and joins and eqn.primitive.name not in ("gather", "dynamic_slice"):
        return maker, 0
    return index, operand
