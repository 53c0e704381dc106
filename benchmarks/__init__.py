"""Benchmarks of `refrain bench`, one module each.

    add_arguments(parser)     its arguments
    measure(args, console)    the `BenchReport`; progress goes to the console
    show(report, console)     the same for people

`args.command` is the command line. `flows.bench` names the modules and imports them when asked.
"""
