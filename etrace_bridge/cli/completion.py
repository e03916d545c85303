"""`completion`: a script that completes commands and options in the shell.

The script is made from the parsers themselves, so it knows every option; nothing else is needed to
install, and completing runs no Python.
"""

from __future__ import annotations

import argparse
from typing import Any

from etrace_bridge.cli.arguments import OK

_BASH = """# Completes `etrace-bridge`. In your ~/.bashrc or ~/.zshrc: eval "$(etrace-bridge completion {shell})"
_etrace_bridge() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words="{commands}"
    if [[ $COMP_CWORD -gt 1 ]]; then
        case "${{COMP_WORDS[1]}}" in
{cases}
            *) words="";;
        esac
        [[ "$word" == -* ]] || {{ COMPREPLY=($(compgen -f -- "$word")); return; }}
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o filenames -F _etrace_bridge etrace-bridge
"""
_ZSH = "autoload -Uz bashcompinit && bashcompinit\n"


def add_completion(commands: Any) -> None:
    """Add `completion`: the completion script of a shell."""
    parser = commands.add_parser(
        "completion", help="print a script for tab completion in bash or zsh"
    )
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell")
    parser.set_defaults(
        run=lambda args: _print_script(commands.choices, args.shell), json=False, debug=False
    )


def _print_script(parsers: dict[str, argparse.ArgumentParser], shell: str) -> int:
    cases = []
    for name, parser in parsers.items():
        options = sorted(
            o for action in parser._actions for o in action.option_strings if o.startswith("--")
        )
        cases.append(f'            {name}) words="{" ".join(options)}";;')
    script = _BASH.format(shell=shell, commands=" ".join(parsers), cases="\n".join(cases))
    print((_ZSH if shell == "zsh" else "") + script, end="")
    return OK
