"""Where each library's modules store their state; one library per file."""

if __name__ == "adapters":
    raise ImportError(
        "`adapters` is the source folder of the package `etrace_bridge.adapters`; import it by "
        "that name. If you see this in a checkout, install the project first: pip install -e ."
    )
