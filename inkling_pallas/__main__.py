"""`python -m inkling_pallas COMMAND`: demo, check, bench, report, serve-sim, bench-context, bench-write."""

import importlib
import sys
from collections.abc import Sequence

_COMMANDS = {
    "demo": "a serving step on request lengths of a trace, checked against the oracle",
    "check": "every backend of this machine on the cases that it must pass",
    "bench": "time named cases against ceilings and peers",
    "report": "write README's tables and plots from the results of bench",
    "bench-context": "time a decode whose keys are cut over several devices, against one device",
    "bench-write": "time cache writes against a copy of the same bytes",
    "serve-sim": "continuous batching over the requests of a trace, checked against the oracle",
}
_MODULES = {
    "demo": "serving.demo",
    "check": "testing.command",
    "bench": "bench.command",
    "report": "bench.report",
    "bench-context": "bench.context",
    "bench-write": "bench.write_kv",
    "serve-sim": "serving.simulate",
}


def main(argv: Sequence[str]) -> int:
    """Runs a command; returns the exit status."""
    if argv and argv[0] in _COMMANDS:
        return importlib.import_module(f"inkling_pallas.{_MODULES[argv[0]]}").main(argv[1:])
    help_asked = bool(argv) and argv[0] in ("-h", "--help")
    stream = sys.stdout if help_asked else sys.stderr
    if argv and not help_asked:
        print(f"inkling_pallas: there is no command {argv[0]!r}.", file=stream)
    print("usage: python -m inkling_pallas COMMAND [options]; --help after a command lists its options", file=stream)
    for name, meaning in _COMMANDS.items():
        print(f"  {name:13} {meaning}", file=stream)
    return 0 if help_asked else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
