"""Where the state of each library's modules lives; one file a library."""

if __name__ == "adapters":
    raise ImportError(
        "`adapters` is the source folder of the package `etrace_bridge.adapters`; import it by "
        "that name. If you see this in a checkout, install the project first: pip install -e ."
    )
