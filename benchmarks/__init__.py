"""Benchmarks of `refrain bench`, one module each.

    PACKAGES                  packages whose versions may change its figures
    add_arguments(parser)     add its arguments
    measure(args, console)    return figures and rows of its `BenchReport`; progress goes to the
                              console
    show(report, console)     print the report for people

`flows.bench` lists the modules and imports the one that you ask for.
"""
