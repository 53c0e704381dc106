"""Benchmarks of `refrain bench`, one module each.

    PACKAGES                  those on whose versions its figures may depend
    add_arguments(parser)     its arguments
    measure(args, console)    figures and rows of its `BenchReport`; progress goes to the console
    show(report, console)     the same for people

`flows.bench` names the modules and imports them when asked.
"""
