"""A process that tests start from nothing has torch at a third of its price.

It works in each Python process that has this folder in its ``PYTHONPATH``. Three things cost twice
what a small rank does, and say nothing of it:

- Torch's compiler, which an optimizer's first step and DDP's constructor import, to be told that
  nothing is compiled. Here they are told so without it. It is imported once anything else of it
  is asked for, so that ``torch.compile`` finds all of it.
- The collector, which looks through a million objects while torch is imported, and finds nothing.
- Taking torch apart at the end, object by object. All that is the script's own is taken apart.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib.machinery
import sys
import types

COMPILER = "torch._dynamo"
LARGE = ("torch", "sympy", "mpmath", "numpy", "functorch", "torchgen")


class Finder:
    """Finds torch and its compiler before others do, and executes them in its own way."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Return the spec of one of the two; None: it is another module."""
        if name not in ("torch", COMPILER):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec:
            execute = functools.partial(rest_during, spec.loader.exec_module)
            if name == COMPILER:
                execute = functools.partial(put_off, execute)
            spec.loader.exec_module = execute
        return spec


def rest_during(execute, module):
    """Execute a module, and have the collector rest."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        execute(module)
    finally:
        if enabled:
            gc.enable()


class Part:
    """A module of the compiler of which only ``known`` is asked; else it is the module itself."""

    def __init__(self, load, name, **known):
        self._load, self._name = load, name
        self.__dict__.update(known)

    def __getattr__(self, wanted):
        return getattr(getattr(self._load(), self._name), wanted)


class Compiler(types.ModuleType):
    """The compiler, not executed until it is asked for more than it can say by then."""

    def __getattribute__(self, name):
        if name in SAID or (name[:2] == "__" and name != "__path__"):  # who looks at all modules
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "__dict__")["load"](), name)


SAID = ("disable", "graph_break", "utils", "trace_rules")


def put_off(execute, module):
    """Have a module wait to be executed."""
    contents = module.__dict__

    def load():
        if type(module) is Compiler:
            module.__class__ = types.ModuleType
            for name in SAID:
                del contents[name]
            execute(module)
        return module

    contents.update(
        load=load,
        disable=functools.partial(disabled, module),
        graph_break=lambda *_: None,
        utils=Part(load, "utils", get_optimize_ddp_mode=lambda: "ddp_optimizer"),
        trace_rules=Part(load, "trace_rules", clear_lru_cache=lambda: None),
    )
    module.__class__ = Compiler


def disabled(compiler, function=None, recursive=True, **how):
    """Return a function as it is, for as long as there is no compiler that could look into it."""
    if function is None:
        return functools.partial(disabled, compiler, recursive=recursive, **how)
    real = []

    @functools.wraps(function)
    def called(*arguments, **named):
        if type(compiler) is Compiler:
            return function(*arguments, **named)
        if not real:
            real.append(compiler.disable(function, recursive, **how))
        return real[0](*arguments, **named)

    return called


def stay():
    """Have large packages outlive the interpreter; run after all else that runs at exits.

    The collector finds nothing by then, so all other modules are kept until their turn comes.
    """
    gc.freeze()
    for name, module in list(sys.modules.items()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
        if name.partition(".")[0] in LARGE:
            del sys.modules[name]


atexit.register(stay)
sys.meta_path.insert(0, Finder)
