"""How close online gradients come to torch BPTT, over the zoo of torch modules: `python benchmarks/fidelity.py`.

Writes `docs/fidelity.md`. Every module runs eight steps in chunks of four in float64, so that the trace is used; the cosine is
that of all parameters that enter the recurrence, together, to torch's own BPTT on the torch module.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "fidelity.md"

HEAD = """# How close to BPTT

Cosine to torch BPTT over the zoo of torch modules that the tests use, by `credit` of D-RTRL and of pp-prop, and the largest relative
error of exact RTRL. Made by `python benchmarks/fidelity.py`: eight steps in chunks of four, float64, random weights and inputs; all
parameters that enter the recurrence together. *exact* counts the parameters whose certificate says that D-RTRL equals BPTT, of all
that the module trains. A network of short memory is easy: these numbers compare the kinds of credit, they do not promise a
cosine for your model. [`check_gradients`](reading-the-report.md) measures that.

"""


def main() -> None:
    """Measure every module and write the page."""
    parser = argparse.ArgumentParser(description="Cosine to torch BPTT over the zoo of torch modules.")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th module, and write nothing")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    sys.path.insert(0, str(ROOT / "tests"))
    warnings.simplefilter("ignore")
    from etrace_bridge.rules import DRTRL, RTRL, PPProp
    from torch_zoo import CASES
    from zoo.online import OnlineCase

    rules = {f"`d_rtrl` {credit}": DRTRL(credit) for credit in ("core", "step", "chunk")}
    rules |= {f"`pp_prop` {credit}": PPProp(credit=credit) for credit in ("core", "step")}
    rows, sums = [], dict.fromkeys(rules, 0.0)
    for case in CASES[:: options.every]:
        if case.float32_only or not case.available or not any(p.requires_grad for p in case.build().parameters()):
            continue
        online = OnlineCase(case)
        cosines = {name: online.cosine(online.gradients(rule, 4)) for name, rule in rules.items()}
        error = max(online.errors(online.gradients(RTRL(), 4)).values())
        certificates = online.certificates().values()
        exact = f"{sum(c.exact for c in certificates)} of {len(certificates)}"
        rows.append([case.name, exact, *(f"{cosines[name]:.4f}" for name in rules), f"{error:.0e}"])
        for name in rules:
            sums[name] += cosines[name]
        print("  ".join(rows[-1]), flush=True)
    header = ["module", "exact", *rules, "`rtrl` error"]
    mean = [f"**mean of {len(rows)}**", "", *(f"**{sums[name] / len(rows):.4f}**" for name in rules), ""]
    lines = [header, ["---"] * len(header), mean, *rows]
    if options.every == 1:
        PAGE.write_text(HEAD + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n")
        print(f"Wrote {PAGE.relative_to(ROOT)}.")


if __name__ == "__main__":
    main()
